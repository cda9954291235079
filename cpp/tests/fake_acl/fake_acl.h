// A stand-in for Ascend's runtime and operators, which runs on the host and holds its caller to
// their contract. What it finds broken it notes, and the call fails.
//
//  - Nothing before aclInit. Every other call but a few needs a context in the calling thread.
//  - Device memory cannot be touched by the host at all. Pinned memory cannot be read while a copy
//    into it, nor written while a copy out of it, has not been synchronized: either ends the
//    process with SIGSEGV, whether or not the copy has run by then.
//  - Work runs on a thread of its stream. Lazily (the default): when the host waits for it, no
//    sooner. Memory must not be freed, nor streams destroyed, before.
//  - Fresh memory is NaN as floats and -1 as indexes; workspaces are overwritten.
//  - An executor is launched once; descriptors live until it is, and are destroyed after.
//  - What is not given back is counted.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_ACL_API __attribute__((visibility("default")))

extern "C" {

enum FakeAclWork : int { kFakeAclLazy = 0, kFakeAclEager = 1 };

/// Forgets what was found and counted so far, failures to come, and the limit of memory.
FAKE_ACL_API void fake_acl_reset(FakeAclWork work);
/// Breaches of the contract since then, one a line; "" if none. Valid until the next call of it.
FAKE_ACL_API const char* fake_acl_violations();
/// What has not been given back: "2 blocks of device memory, 1 stream"; "" if nothing.
FAKE_ACL_API const char* fake_acl_live();

/// Calls since the reset that could have failed.
FAKE_ACL_API std::int64_t fake_acl_num_calls();
/// Lets the n-th such call from now on (0: the next) fail with `status`; and every later one too if
/// `for_good`. What frees or destroys does so all the same.
FAKE_ACL_API void fake_acl_fail(std::int64_t n, int status, bool for_good);
/// The function that failed so; "" if none has.
FAKE_ACL_API const char* fake_acl_failed_call();

/// Bytes of device memory that there are; 0: no limit.
FAKE_ACL_API void fake_acl_limit_memory(std::size_t bytes);
FAKE_ACL_API void fake_acl_set_num_devices(std::uint32_t count);
/// Pieces of work that streams have run so far, and that they have yet to run.
FAKE_ACL_API std::int64_t fake_acl_num_done();
FAKE_ACL_API std::int64_t fake_acl_num_waiting();
}
