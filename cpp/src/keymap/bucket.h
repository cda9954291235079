// The bucket line: one cache line with five keys, their row numbers and what is needed to stop a
// probe.
//
// Why: random access is bound by the number of pages touched per key, so key and row number share a
// line. No key value is reserved: occupancy is five bits of the header. A key that finds its line
// full goes to the other line of the 128-byte pair (same page, fetched by the same prefetcher),
// then to the next pairs; every line it passes sets one of 24 Bloom bits. A probe goes on only
// where that bit is set, so most misses end in the first line. Erasing clears the occupancy bit;
// Bloom bits stay until the segment is rebuilt.
#pragma once

#ifdef __SSE4_1__
#include <smmintrin.h>
#endif

#include <bit>
#include <cstdint>

#include "recsdk/types.h"

namespace recsdk::internal {

inline constexpr std::uint32_t kBucketSlots = 5;

struct alignas(64) Bucket {
  Key keys[kBucketSlots];
  // Row numbers of the five slots, then the header: bits 0-4 occupancy, bits 8-31 Bloom filter.
  std::uint32_t words[kBucketSlots + 1];

  std::uint32_t header() const { return words[kBucketSlots]; }
  std::uint32_t occupancy() const { return header() & 31U; }
  bool is_full() const { return occupancy() == 31U; }
  bool has_passed(std::uint32_t bloom_bit) const { return (header() & bloom_bit) != 0; }
  void mark_passed(std::uint32_t bloom_bit) { words[kBucketSlots] |= bloom_bit; }

  /// One bit per slot that holds the key.
  std::uint32_t match(Key key) const {
#ifdef __SSE4_1__
    const __m128i wanted = _mm_set1_epi64x(key);
    const auto equal = [&](int i) {
      const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i));
      return _mm_castsi128_ps(_mm_cmpeq_epi64(pair, wanted));
    };
    // The low halves of the four comparisons, side by side.
    const __m128 four = _mm_shuffle_ps(equal(0), equal(2), _MM_SHUFFLE(2, 0, 2, 0));
    const std::uint32_t mask = static_cast<std::uint32_t>(_mm_movemask_ps(four)) |
                               static_cast<std::uint32_t>(keys[4] == key) << 4;
#else
    std::uint32_t mask = 0;
    for (std::uint32_t i = 0; i < kBucketSlots; ++i)
      mask |= static_cast<std::uint32_t>(keys[i] == key) << i;
#endif
    return mask & occupancy();
  }

  /// Writes to the first free slot; there must be one.
  void put(Key key, std::uint32_t row) {
    const auto slot = static_cast<std::uint32_t>(std::countr_one(occupancy()));
    keys[slot] = key;
    words[slot] = row;
    words[kBucketSlots] |= 1U << slot;
  }

  void remove(std::uint32_t slot) { words[kBucketSlots] &= ~(1U << slot); }
};
static_assert(sizeof(Bucket) == 64);

/// The parts of a key's hash; they share no bit, so that what directory, bucket and Bloom filter
/// see is independent.
struct HashParts {
  std::uint64_t hash;

  std::uint32_t bucket_in(std::uint32_t num_buckets) const {
    return static_cast<std::uint32_t>(
        (std::uint64_t{static_cast<std::uint32_t>(hash)} * num_buckets) >> 32);
  }
  std::uint32_t bloom_bit() const { return 1U << (8 + ((((hash >> 32) & 0xFFU) * 24) >> 8)); }
  /// The top `depth` bits, 0 <= depth <= kMaxDepth.
  std::uint64_t prefix(int depth) const { return (hash >> 1) >> (63 - depth); }
};

/// The largest size, in units of the arena, that a segment of uniform keys reaches before it
/// splits.
inline constexpr std::uint32_t kLargestSplit = 13;

/// Bits of the hash that the directory may use.
inline constexpr int kMaxDepth = 24;

/// The i-th bucket that a key with home bucket `home` tries.
inline std::uint32_t probe_bucket(std::uint32_t home, std::uint32_t i, std::uint32_t num_buckets) {
  const std::uint32_t num_pairs = num_buckets / 2;
  std::uint32_t pair = home / 2 + i / 2;
  if (pair >= num_pairs) pair -= num_pairs;
  return pair * 2 + ((home ^ i) & 1U);
}

/// The other line of a bucket's pair, which a key tries second.
inline const Bucket* buddy_of(const Bucket* bucket) {
  return reinterpret_cast<const Bucket*>(reinterpret_cast<std::uintptr_t>(bucket) ^ sizeof(Bucket));
}
inline Bucket* buddy_of(Bucket* bucket) {
  return reinterpret_cast<Bucket*>(reinterpret_cast<std::uintptr_t>(bucket) ^ sizeof(Bucket));
}

}  // namespace recsdk::internal
