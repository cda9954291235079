// What the stand-in knows: contexts, memory, streams, descriptors.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/npu/acl_api.h"
#include "fake_acl/fake_acl.h"

namespace recsdk::internal::acl {

// Descriptors, as the stand-in fills them.
struct Tensor {
  std::vector<std::int64_t> dims;
  DataType dtype = DataType::kFloat;
  void* data = nullptr;  // in device memory
};
struct Scalar {
  float value = 0.0F;
};
struct IntArray {
  std::vector<std::int64_t> values;
};
struct OpExecutor {
  std::string name;
  std::vector<const Tensor*> tensors;
  std::uint64_t workspace_size = 0;
  std::function<void()> run;
};

}  // namespace recsdk::internal::acl

namespace recsdk::fake {

using Lock = std::unique_lock<std::mutex>;

namespace acl = internal::acl;
using acl::Status;

inline constexpr Status kInvalidParam = 100000;
inline constexpr Status kUninitialized = 100001;
inline constexpr Status kContextNull = 107002;
inline constexpr std::size_t kAlignment = 64;

struct Stream;

/// A copy that the host has not waited for.
struct Pending {
  Stream* stream;
  std::uint64_t number;
  bool writes_block;
};

/// Memory mapped twice: as the caller sees it, and as the device does.
struct Block {
  bool is_device = false;
  std::size_t size = 0;
  std::size_t mapped = 0;
  std::byte* user = nullptr;
  std::byte* device = nullptr;
  std::vector<Pending> pending;  // of pinned memory
};

struct Task {
  std::uint64_t number = 0;
  std::vector<const void*> blocks;  // that it uses, by their first address
  std::function<void()> run;
};

struct Stream {
  acl::Context context = nullptr;
  std::deque<Task> tasks;
  std::uint64_t submitted = 0;
  std::uint64_t released = 0;  // those up to it may run
  std::uint64_t done = 0;
  bool stops = false;
  std::thread thread;
};

struct Event {
  Stream* stream = nullptr;  // of the last record
  std::uint64_t number = 0;
  std::uint32_t flag = 0;
};

/// Everything; one mutex guards it.
class State {
 public:
  /// Lives as long as the process: threads of streams may outlive main.
  static State& get();

  std::mutex mutex;
  std::condition_variable changed;

  bool is_initialized = false;
  bool is_eager = false;
  std::uint32_t num_devices = 1;
  std::size_t memory_limit = 0;
  std::size_t memory_used = 0;
  std::map<int, std::int64_t> device_uses;
  std::map<const std::byte*, Block> blocks;  // by first address, as the caller sees it
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::set<const acl::Tensor*> tensors;
  std::set<const acl::Scalar*> scalars;
  std::set<const acl::IntArray*> int_arrays;
  std::set<acl::OpExecutor*> executors;
  std::int64_t num_done = 0;

  std::vector<std::string> violations;
  std::int64_t num_calls = 0;
  std::int64_t calls_to_failure = -1;
  Status failure = 0;
  bool fails_for_good = false;
  std::string failed_call;

  // All of these: the mutex is held.

  /// Begins a call: kSuccess, or what it has to fail with.
  Status begin(const char* call, bool needs_context = true);
  /// Notes a breach of the contract and returns kInvalidParam.
  Status violate(const std::string& what);
  /// The block that has all of [address, address + size); null, and a breach, if none has.
  Block* find(const char* call, const void* address, std::size_t size, bool is_device);
  /// Where the device sees an address.
  void* seen_by_device(const void* address);
  void submit(Stream& stream, std::vector<const void*> blocks, std::function<void()> run);
  /// Waits until the stream has done its work up to `number`, and lets the host have what it
  /// copied.
  void wait(std::unique_lock<std::mutex>& lock, Stream& stream, std::uint64_t number);
  bool is_used(const void* block) const;
  void protect(Block& block);
};

/// The calling thread's context: the address of a device's number, or null.
extern thread_local acl::Context current_context;

}  // namespace recsdk::fake
