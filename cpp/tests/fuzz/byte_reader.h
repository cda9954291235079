// Decisions of a random test, read from bytes, so that a fuzzer can steer them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace recsdk::test {

class ByteReader {
 public:
  ByteReader(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  bool is_done() const { return next_ == end_; }

  /// 0 after the end.
  std::uint8_t byte() { return is_done() ? std::uint8_t{0} : *next_++; }

  /// A number of [0, limit), limit up to 65,536.
  std::int64_t below(std::int64_t limit) {
    const std::int64_t low = byte();
    return (limit > 256 ? low | std::int64_t{byte()} << 8 : low) % limit;
  }

  bool flag() { return (byte() & 1U) != 0; }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

}  // namespace recsdk::test
