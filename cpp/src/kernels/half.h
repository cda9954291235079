// 16-bit floats, one at a time. The kernels have the same for whole registers.
//
// bfloat16 is the upper half of a float32; float16 is IEEE 754's binary16. Both widen exactly. They
// are made by rounding to the nearest, ties to even; beyond the largest finite number that gives
// infinity, as in torch. A NaN stays one, with the payload that fits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "recsdk/row_layout.h"

namespace recsdk::internal {

inline float widen_bfloat16(std::uint16_t half) {
  return std::bit_cast<float>(std::uint32_t{half} << 16);
}

inline float widen_float16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {
    const std::uint32_t quiet = magnitude > 0x7C00U ? 0x400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (magnitude << 13));
  }
  if (magnitude >= 0x0400U) return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
  return std::copysign(static_cast<float>(magnitude) * 0x1p-24F, std::bit_cast<float>(sign));
}

inline std::uint16_t nearest_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

inline std::uint16_t nearest_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | (bits >> 13 & 0x3FFU);
  } else if (magnitude >= 143U << 23) {  // 2^16
    half = 0x7C00U;
  } else if (magnitude >= 113U << 23) {  // 2^-14
    const std::uint32_t m = magnitude - (112U << 23);
    half = (m + 0xFFFU + (m >> 13 & 1U)) >> 13;
  } else {  // multiples of 2^-24, as are the last bits of numbers from 0.5 to 1
    half = std::bit_cast<std::uint32_t>(std::fabs(x) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// dtype is one of the 16-bit types.
inline float widen(DType dtype, std::uint16_t half) {
  return dtype == DType::kBFloat16 ? widen_bfloat16(half) : widen_float16(half);
}
inline std::uint16_t nearest(DType dtype, float x) {
  return dtype == DType::kBFloat16 ? nearest_bfloat16(x) : nearest_float16(x);
}

}  // namespace recsdk::internal
