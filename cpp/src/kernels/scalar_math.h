// Powers, logarithms and exponentials of single numbers, and the round keys of random numbers. They
// are our own, since those of the C library differ between processors.
//
// The functions are static: the kernels compile them for instruction sets that other code must not
// use.
#pragma once

#include <cstdint>

namespace recsdk::internal {

/// base^exponent by squaring.
static inline double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

/// log((1 + z) / (1 - z)) for |z| < 0.18, by its series.
static inline double log_of_ratio(double z) {
  double sum = 0.0;
  for (int n = 23; n > 0; n -= 2) sum = sum * (z * z) + 1.0 / n;
  return 2.0 * z * sum;
}

/// log(1 - x) for 0 <= x < 1. Error: 1e-15 relative.
static inline double log_one_minus(double x) {
  constexpr double kLog2 = 0.6931471805599453;
  if (x < 0.25) return log_of_ratio(-x / (2.0 - x));
  double rest = 1.0 - x;
  double doublings = 0.0;
  while (rest < 0.75) {
    rest *= 2.0;
    doublings += 1.0;
  }
  return log_of_ratio((rest - 1.0) / (rest + 1.0)) - doublings * kLog2;
}

/// exp(x) for x <= 0; 0 where a float could not hold the result. Error: 1e-13 relative.
static inline double exp_of_negative(double x) {
  if (!(x > -104.0)) return 0.0;
  double sum = 1.0;  // of exp(x / 256), whose series is short
  for (int n = 14; n > 0; --n) sum = 1.0 + sum * (x / 256.0) / n;
  for (int i = 0; i < 8; ++i) sum *= sum;
  return sum;
}

/// The round keys of Philox4x32 under a 64-bit stream: two of 32 bits for each round.
static inline void fill_round_keys(std::uint64_t stream, int num_rounds, std::uint64_t* keys) {
  auto k0 = static_cast<std::uint32_t>(stream);
  auto k1 = static_cast<std::uint32_t>(stream >> 32);
  for (int round = 0; round < num_rounds; ++round) {
    keys[2 * round] = k0;
    keys[2 * round + 1] = k1;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

}  // namespace recsdk::internal
