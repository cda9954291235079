// Powers for Adam's bias correction: of our own, since pow() of the C library differs between
// processors.
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

}  // namespace recsdk::internal
