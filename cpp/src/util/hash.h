// The hash of the index. Seeded, so that nobody who does not know the seed can choose keys that
// collide.
#pragma once

#include <cstdint>

#include "recsdk/types.h"

namespace recsdk::internal {

/// What SplitMix64 adds at each step: 2^64 over the golden ratio.
/// Source: G. Steele et al., OOPSLA 2014.
inline constexpr std::uint64_t kIncrement = 0x9E3779B97F4A7C15U;

/// Folds the 128-bit product of two 64-bit numbers.
/// Source: the multiply-and-fold step of wyhash (Wang Yi, public domain).
inline std::uint64_t multiply_fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// A bijection of 64-bit numbers in which every input bit reaches every output bit.
/// Source: finalizer of SplitMix64, G. Steele et al., OOPSLA 2014.
inline std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// The hash whose low 16 bits are a key's virtual shard; it never changes.
inline std::uint64_t virtual_shard_hash(std::uint64_t key) { return mix64(key + kIncrement); }

/// The number of which mix64 makes this one. Its factors are inverse to mix64's modulo 2^64.
inline std::uint64_t unmix64(std::uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3U;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089U;
  return x ^ (x >> 30) ^ (x >> 60);
}

/// The key of a virtual_shard_hash.
inline std::uint64_t virtual_shard_key(std::uint64_t hash) { return unmix64(hash) - kIncrement; }

/// Two rounds of multiply_fold under secrets that are drawn from a seed.
class SeededHash {
 public:
  explicit SeededHash(std::uint64_t seed)
      : secret0_(mix64(seed + kIncrement)),
        // An odd factor with mixed bits: a small or even one would weaken the product.
        secret1_(mix64(seed + 2 * kIncrement) | 1U),
        secret2_(mix64(seed + 3 * kIncrement)) {}

  std::uint64_t operator()(Key key) const {
    const std::uint64_t x = static_cast<std::uint64_t>(key) ^ secret0_;
    return multiply_fold(multiply_fold(x, secret1_) ^ x ^ secret2_, kOdd);
  }

 private:
  static constexpr std::uint64_t kOdd = 0x9FB21C651E98DF25U;
  std::uint64_t secret0_;
  std::uint64_t secret1_;
  std::uint64_t secret2_;
};

}  // namespace recsdk::internal
