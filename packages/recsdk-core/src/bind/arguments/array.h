// Turns Python array arguments into pointers: numpy by its array interface, torch by data_ptr() and
// attributes, anything else by DLPack. Nothing is copied except int32 where int64 is wanted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>

namespace recsdk::bind {

namespace nb = nanobind;

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

/// Bytes of one element.
std::int64_t item_size(Scalar scalar);

/// Throws TypeError for what is no array, ValueError for an array that is not on the CPU.
Array resolve(nb::handle object, const char* name);

/// Fills in what numpy says of `array.object`, which is one of its arrays.
void resolve_numpy(Array& array);

/// Throws ValueError if the memory of a resolved array is no longer where it was, or has another
/// size: arrays may be resized in place. What came by DLPack is held as it was.
void require_unmoved(const Array& array);

/// Throws ValueError if the array is read-only.
void require_writable(Array& array);

}  // namespace recsdk::bind
