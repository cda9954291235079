// Arguments for calls of a C interface, of which a few are wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

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
    if (!rarely()) return static_cast<std::int64_t>(size);
    return in_.flag() ? -1 : std::numeric_limits<std::int64_t>::min();
  }

  ByteReader in_;
};

}  // namespace recsdk::test
