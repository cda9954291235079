// Writes past the caches, of what is not read again soon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace recsdk::internal {

/// Copies 8 bytes, without reading the line that they go to. On other machines than x86 as any
/// copy.
inline void stream_8_bytes(const std::byte* from, std::byte* to) noexcept {
  std::int64_t bytes = 0;
  std::memcpy(&bytes, from, sizeof bytes);
#if defined(__x86_64__)
  _mm_stream_si64(reinterpret_cast<long long*>(to), bytes);
#else
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

/// Must stand between streamed writes and what tells another thread of them.
inline void finish_streams() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace recsdk::internal
