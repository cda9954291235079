// From floats to stored rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/half.h"
#include "recsdk/freeze.h"
#include "serving/format.h"

namespace recsdk {
namespace {

struct Range {
  float low;
  float high;
};

// Of values that are all finite, and so is high - low; else false.
bool find_range(std::span<const float> row, Range& range) {
  range = {row[0], row[0]};
  bool is_finite = true;
  for (const float x : row) {
    is_finite &= std::isfinite(x);
    range.low = std::min(range.low, x);
    range.high = std::max(range.high, x);
  }
  return is_finite && std::isfinite(range.high - range.low);
}

void put_float(std::byte* out, float value) { std::memcpy(out, &value, sizeof(value)); }
void put_half(std::byte* out, std::uint16_t value) { std::memcpy(out, &value, sizeof(value)); }

bool to_int8(std::span<const float> row, std::byte* out) {
  Range range{};
  if (!find_range(row, range)) return false;
  const float width = range.high - range.low;
  const float inverse = 255.0F / (width + 1e-8F);
  for (const float x : row) *out++ = static_cast<std::byte>(std::lrint((x - range.low) * inverse));
  put_float(out, width / 255.0F);
  put_float(out + 4, range.low);
  return true;
}

bool to_int4(std::span<const float> row, std::byte* out) {
  Range range{};
  if (!find_range(row, range)) return false;
  const std::uint16_t bias = internal::nearest_float16(range.low);
  const float low = internal::widen_float16(bias);
  const float width = range.high - low;
  float scale =
      internal::widen_float16(internal::nearest_float16(width == 0.0F ? 1.0F : width / 15.0F));
  if (!std::isfinite(low) || !std::isfinite(scale)) return false;
  if (scale == 0.0F) scale = 1.0F;
  float inverse = 1.0F / scale;
  if (std::isinf(inverse)) scale = inverse = 1.0F;
  std::byte* const scalars = out + (row.size() + 1) / 2;
  std::fill(out, scalars, std::byte{0});
  for (std::size_t i = 0; i < row.size(); ++i) {
    const long steps = std::clamp(std::lrint((row[i] - low) * inverse), 0L, 15L);
    out[i / 2] |= static_cast<std::byte>(steps << (4 * (i % 2)));
  }
  put_half(scalars, internal::nearest_float16(scale));
  put_half(scalars + 2, bias);
  return true;
}

// False if a finite value would become infinite.
bool to_halves(std::span<const float> row, DType dtype, std::byte* out) {
  bool fits = true;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::uint16_t half = internal::nearest(dtype, row[i]);
    fits &= !std::isfinite(row[i]) || std::isfinite(internal::widen(dtype, half));
    put_half(out + 2 * i, half);
  }
  return fits;
}

}  // namespace

std::int64_t frozen_row_bytes(FrozenDType dtype, std::int64_t dim) {
  return internal::frozen_row_bytes(dtype, dim);
}

bool quantize_row(FrozenDType dtype, std::span<const float> row, std::byte* out) {
  switch (dtype) {
    case FrozenDType::kFloat32:
      std::memcpy(out, row.data(), row.size_bytes());
      return true;
    case FrozenDType::kBFloat16:
      return to_halves(row, DType::kBFloat16, out);
    case FrozenDType::kFloat16:
      return to_halves(row, DType::kFloat16, out);
    case FrozenDType::kInt8:
      return to_int8(row, out);
    case FrozenDType::kInt4:
      return to_int4(row, out);
  }
  return false;
}

}  // namespace recsdk
