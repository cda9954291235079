// Asking for memory before it is needed.
#pragma once

namespace recsdk::internal {

/// Has the cache line of an address come; any address will do.
///
/// The empty statement counts as an effect. GCC 12 takes a prefetch for none, finds that a function
/// that does nothing else has no effect, and drops the calls of it.
inline void prefetch_line(const void* address) noexcept {
  __builtin_prefetch(address);
  asm volatile("");
}

}  // namespace recsdk::internal
