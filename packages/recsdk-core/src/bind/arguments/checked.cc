#include "arguments/checked.h"

#include <string>
#include <vector>

#include "arguments/array_errors.h"

namespace recsdk::bind {
namespace {

bool is_contiguous(const Array& array) {
  if (array.size() <= 1) return true;
  if (array.rank == 1) return array.strides[0] == 1;
  return (array.shape[1] == 1 || array.strides[1] == 1) &&
         (array.shape[0] == 1 || array.strides[0] == array.shape[1]);
}

void require_rank(const Array& array, int rank, const char* shape) {
  if (array.rank != rank) throw_bad_rank(array, shape);
}

void require_contiguous(const Array& array) {
  if (!array.is_aligned || !is_contiguous(array)) throw_not_contiguous(array);
}

/// An array of one dtype, which messages call by `name_of_dtype`.
Array of_dtype(nb::handle object, const char* name, Scalar wanted, const char* name_of_dtype) {
  Array array = resolve(object, name);
  if (array.scalar != wanted) throw_bad_dtype(array, name_of_dtype, name_of_dtype);
  return array;
}

/// The elements of an int32 array as int64.
std::vector<std::int64_t> widen(const Array& array) {
  const auto* begin = static_cast<const std::int32_t*>(array.data);
  return {begin, begin + array.shape[0]};
}

std::span<const std::int64_t> int64_span(const Array& array) {
  return {static_cast<const std::int64_t*>(array.data), static_cast<std::size_t>(array.shape[0])};
}

}  // namespace

Keys::Keys(nb::handle object, const char* name) : array_(resolve(object, name)) {
  const bool is_narrow = array_.scalar == Scalar::kInt32;
  if (!is_narrow && array_.scalar != Scalar::kInt64 && array_.scalar != Scalar::kUint64)
    throw_bad_dtype(array_, "int64 or uint64", "int64");
  require_rank(array_, 1, "(N,)");
  require_contiguous(array_);
  if (is_narrow) widened_ = widen(array_);
  span_ = is_narrow ? std::span<const Key>(widened_) : int64_span(array_);
}

Array integers(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kInt32 && array.scalar != Scalar::kInt64)
    throw_bad_dtype(array, "int64 or int32", "int64");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Integers::Integers(nb::handle object, const char* name) : array_(integers(object, name)) {
  const bool is_narrow = array_.scalar == Scalar::kInt32;
  if (is_narrow) widened_ = widen(array_);
  span_ = is_narrow ? std::span<const std::int64_t>(widened_) : int64_span(array_);
}

Integers Integers::if_given(nb::handle object, const char* name) {
  return object.is_none() ? Integers() : Integers(object, name);
}

NarrowIntegers::NarrowIntegers(nb::handle object, const char* name)
    : array_(resolve(object, name)) {
  const bool is_wide = array_.scalar == Scalar::kInt64;
  if (!is_wide && array_.scalar != Scalar::kInt32)
    throw_bad_dtype(array_, "int32 or int64", "int32");
  require_rank(array_, 1, "one dimension");
  require_contiguous(array_);
  if (!is_wide) {
    span_ = {static_cast<const std::int32_t*>(array_.data),
             static_cast<std::size_t>(array_.shape[0])};
    return;
  }
  for (const std::int64_t number : int64_span(array_)) {
    narrowed_.push_back(static_cast<std::int32_t>(number));
    if (narrowed_.back() != number)
      throw nb::value_error(
          (std::string(name) + " must be below 2**31, got " + std::to_string(number)).c_str());
  }
  span_ = narrowed_;
}

Array numbers_to_fill(nb::handle object, const char* name) {
  Array out = resolve(object, name);
  if (out.scalar != Scalar::kInt32 && out.scalar != Scalar::kInt64)
    throw_bad_dtype(out, "int32 or int64", "int32");
  require_rank(out, 1, "(N,)");
  require_contiguous(out);
  require_writable(out);
  return out;
}

Array floats(nb::handle object, const char* name) {
  Array array = of_dtype(object, name, Scalar::kFloat32, "float32");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Array floats(nb::handle object, const char* name, std::int64_t n) {
  Array array = of_dtype(object, name, Scalar::kFloat32, "float32");
  if (array.rank != 1 || array.shape[0] != n) throw_bad_shape(array, n);
  require_contiguous(array);
  return array;
}

Array floats(nb::handle object, const char* name, std::int64_t n, std::int64_t width) {
  Array array = of_dtype(object, name, Scalar::kFloat32, "float32");
  if (array.rank != 2 || array.shape[0] != n || array.shape[1] != width)
    throw_bad_shape(array, n, width);
  require_contiguous(array);
  return array;
}

Array rows(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  constexpr const char* kKnown = "int64, int32, float32 or uint8";
  if (array.scalar == Scalar::kOther) throw_bad_dtype(array, kKnown, "one of them");
  if (array.rank != 1) require_rank(array, 2, "(N,) or (N, columns)");
  require_contiguous(array);
  return array;
}

std::int64_t row_bytes(const Array& array) {
  return item_size(array.scalar) * (array.rank == 1 ? 1 : array.shape[1]);
}

Array bytes(nb::handle object, const char* name) {
  Array array = of_dtype(object, name, Scalar::kUint8, "uint8");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Array outcomes(nb::handle object, const char* name, std::int64_t n) {
  Array array = of_dtype(object, name, Scalar::kUint8, "uint8");
  if (array.rank != 1 || array.shape[0] != n) throw_bad_shape(array, n);
  require_contiguous(array);
  return array;
}

Array matrix(nb::handle object, const char* name, std::int64_t bags, std::int64_t column,
             std::int64_t width) {
  Array array = of_dtype(object, name, Scalar::kFloat32, "float32");
  require_rank(array, 2, "(bags, columns)");
  if (array.shape[0] < bags || column < 0 || width > array.shape[1] ||
      column > array.shape[1] - width)
    throw_too_small(array, bags, column, width);
  const bool is_dense = array.size() == 0 || ((array.shape[1] == 1 || array.strides[1] == 1) &&
                                              row_stride(array) >= array.shape[1]);
  if (!array.is_aligned || !is_dense) throw_not_contiguous(array);
  return array;
}

Array to_fill(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.rank != 1) require_rank(array, 2, "(N,) or (N, columns)");
  require_contiguous(array);
  require_writable(array);
  return array;
}

}  // namespace recsdk::bind
