// Arguments for calls of a C interface, of which a few are wrong.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "fuzz/byte_reader.h"

namespace recsdk::test {

class OddArguments {
 protected:
  OddArguments(const std::uint8_t* data, std::size_t size) : in_(data, size) {}

  bool rarely() { return in_.below(16) == 0; }

  template <typename T>
  T* maybe_null(T* pointer) {
    return rarely() ? nullptr : pointer;
  }

  /// As long as the array, or no length.
  std::int64_t length(std::size_t size) {
    constexpr std::array kNone = {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(),
                                  std::int64_t{1} << 61, std::numeric_limits<std::int64_t>::max()};
    if (!rarely()) return static_cast<std::int64_t>(size);
    return kNone[static_cast<std::size_t>(in_.below(4))];
  }

  /// One that no matrix of `width` columns has.
  std::int64_t no_stride(std::int64_t width) {
    const std::array kNone = {std::int64_t{-1},
                              std::int64_t{0},
                              width - 1,
                              std::numeric_limits<std::int64_t>::min(),
                              std::int64_t{1} << 61,
                              std::numeric_limits<std::int64_t>::max()};
    return kNone[static_cast<std::size_t>(in_.below(6))];
  }

  /// Where the array is, or the other one, over which a call must not write.
  template <typename T, typename Other>
  T* maybe_over(std::vector<T>& array, std::vector<Other>& other) {
    return rarely() ? reinterpret_cast<T*>(other.data()) : array.data();
  }

  ByteReader in_;
};

}  // namespace recsdk::test
