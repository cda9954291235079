// Array arguments that are checked against what a call wants: dtype, shape, contiguous memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <vector>

#include "arguments/array.h"
#include "recsdk/types.h"

namespace recsdk::bind {

/// Keys (N,): int64 or uint64 in place, int32 widened.
class Keys {
 public:
  explicit Keys(nb::handle object, const char* name = "keys");
  std::span<const Key> span() const { return span_; }
  std::size_t size() const { return span_.size(); }
  Framework framework() const { return array_.framework; }

 private:
  Array array_;
  std::vector<Key> widened_;
  std::span<const Key> span_;
};

/// Integers (n,) that are not keys: int64 in place, int32 widened.
class Integers {
 public:
  Integers() = default;
  Integers(nb::handle object, const char* name);
  /// For an argument that may be left out: None gives an empty span.
  static Integers if_given(nb::handle object, const char* name);
  std::span<const std::int64_t> span() const { return span_; }
  Framework framework() const { return array_.framework; }
  /// Throws ValueError if the array was resized since.
  void require_unmoved() const {
    if (widened_.empty()) bind::require_unmoved(array_);
  }

 private:
  Array array_;
  std::vector<std::int64_t> widened_;
  std::span<const std::int64_t> span_;
};

/// int32 or int64 (n,), contiguous, to be read; see `numbers_of`.
Array integers(nb::handle object, const char* name);

/// Integers (n,) below 2^31 in magnitude: int32 in place, int64 narrowed. Throws ValueError for
/// others.
class NarrowIntegers {
 public:
  NarrowIntegers(nb::handle object, const char* name);
  std::span<const std::int32_t> span() const { return span_; }

 private:
  Array array_;
  std::vector<std::int32_t> narrowed_;
  std::span<const std::int32_t> span_;
};

/// int32 or int64 (n,), contiguous, to be written.
Array numbers_to_fill(nb::handle object, const char* name);
template <typename Number>
std::span<Number> numbers_of(const Array& array) {
  return {static_cast<Number*>(array.data), static_cast<std::size_t>(array.shape[0])};
}

/// Contiguous float32 of exactly this shape; throws if it is anything else.
Array floats(nb::handle object, const char* name, std::int64_t n);
/// The same of any length.
Array floats(nb::handle object, const char* name);
Array floats(nb::handle object, const char* name, std::int64_t n, std::int64_t width);
/// Contiguous (N,) or (N, columns) of any dtype named in Scalar.
Array rows(nb::handle object, const char* name);
/// Of one row of such an array.
std::int64_t row_bytes(const Array& array);
/// Contiguous uint8 of any length.
Array bytes(nb::handle object, const char* name);
/// Outcomes, contiguous uint8 (n,).
Array outcomes(nb::handle object, const char* name, std::int64_t n);
/// A float32 matrix, contiguous within each row, with at least `bags` rows and the columns
/// [column, column + width).
Array matrix(nb::handle object, const char* name, std::int64_t bags, std::int64_t column,
             std::int64_t width);
/// From one row of a matrix to the next, in floats; of a single row at least its width.
inline std::int64_t row_stride(const Array& matrix) {
  return matrix.shape[0] > 1 ? matrix.strides[0] : matrix.shape[1];
}
/// Contiguous (N,) or (N, columns) of any dtype, which is written.
Array to_fill(nb::handle object, const char* name);

inline const float* float_data(const Array& array) { return static_cast<const float*>(array.data); }

}  // namespace recsdk::bind
