// Asking for memory before it is needed.
#pragma once

#include <cstddef>

namespace recsdk::internal {

/// How many items ahead of the one at hand a loop asks for what it will need.
inline constexpr std::size_t kItemsAhead = 16;

/// Asks for the cache line of an address. The address need not be valid.
///
/// GCC 12 does not count a prefetch as an effect. It drops calls of a function that does nothing
/// else. The empty statement is an effect to it, so the calls stay.
inline void prefetch_line(const void* address) noexcept {
  __builtin_prefetch(address);
  asm volatile("");
}

/// The same, into the second level of cache.
inline void prefetch_far_line(const void* address) noexcept {
  __builtin_prefetch(address, 0, 2);
  asm volatile("");
}

}  // namespace recsdk::internal
