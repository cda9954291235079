// Turns Python array arguments into pointers: numpy by its array interface, torch by data_ptr() and
// attributes, anything else by DLPack. Nothing is copied except int32 where int64 is wanted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "recsdk/types.h"

namespace recsdk::bind {

namespace nb = nanobind;

/// Looks up numpy's type object and interns names. Called once, when the module is made.
void init_arrays();

enum class Framework : std::uint8_t { kNumpy, kTorch, kOther };
enum class Scalar : std::uint8_t { kInt32, kInt64, kUint64, kUint8, kFloat32, kOther };

/// One array argument as it came: its memory, not yet checked against what the call wants.
struct Array {
  static constexpr int kMaxRank = 2;

  nb::handle object;
  const char* name = "";  ///< of the argument, for messages
  void* data = nullptr;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};    ///< of rank > kMaxRank: unspecified
  std::array<std::int64_t, kMaxRank> strides{};  ///< in elements
  Scalar scalar = Scalar::kOther;
  Framework framework = Framework::kOther;
  bool is_writable = false;
  bool is_aligned = true;
  nb::ndarray<nb::ro> view;  ///< keeps `data` alive if it came by DLPack

  std::int64_t size() const { return rank == 1 ? shape[0] : shape[0] * shape[1]; }
};

/// Throws TypeError for what is no array, ValueError for an array that is not on the CPU.
Array resolve(nb::handle object, const char* name);

/// Throws ValueError if the memory of a resolved array is no longer where it was, or has another
/// size: arrays may be resized in place. What came by DLPack is held as it was.
void require_unmoved(const Array& array);

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

/// Integers (n,) that are not keys: int64 in place, int32 widened. None gives an empty span.
class Integers {
 public:
  Integers() = default;
  Integers(nb::handle object, const char* name);
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
/// Throws ValueError if the array is read-only.
void require_writable(Array& array);

/// Contiguous (N,) or (N, columns) of any dtype, which is written.
Array to_fill(nb::handle object, const char* name);

/// What glibc takes from the system for each allocation, and gives back when it is freed.
inline constexpr std::size_t kLargeBytes = std::size_t{32} << 20;

/// For memory that nobody has touched yet. What is large the system gives anew each time, and a
/// result then waits for it page by page: huge ones take 0.3 of the time. Only a wish.
void ask_for_huge_pages(void* data, std::size_t bytes);

/// A fresh array, of torch if the arguments are torch's, else of numpy.
struct Result {
  nb::object object;
  void* data;
};
Result make_floats(Framework framework, std::int64_t n, std::int64_t width);
Result make_floats(Framework framework, std::int64_t n);
Result make_rows(Framework framework, std::int64_t n);
/// int32.
Result make_narrow(Framework framework, std::int64_t n);
Result make_outcomes(Framework framework, std::int64_t n);

inline const float* float_data(const Array& array) { return static_cast<const float*>(array.data); }
inline std::span<Outcome> outcome_span(const Result& result, std::size_t n) {
  return {static_cast<Outcome*>(result.data), n};
}
inline std::span<RowNumber> row_span(const Result& result, std::size_t n) {
  return {static_cast<RowNumber*>(result.data), n};
}

}  // namespace recsdk::bind
