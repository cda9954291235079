// Checksums of checkpoints: XXH3.
// Source: Y. Collet, xxHash, https://github.com/Cyan4973/xxHash (specification of XXH3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace recsdk::internal {

/// XXH3-64 without a seed. This and what adds bytes throw what recsdk::isa() throws.
std::uint64_t checksum64(std::span<const std::byte> bytes);

/// XXH3-128 of bytes that come in pieces.
class StreamChecksum {
 public:
  StreamChecksum();
  ~StreamChecksum();
  StreamChecksum(const StreamChecksum&) = delete;
  StreamChecksum& operator=(const StreamChecksum&) = delete;

  void add(std::span<const std::byte> bytes);
  /// 32 hexadecimal digits, most significant first.
  std::string text() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// XXH3-64 of bytes that come in pieces.
class StreamChecksum64 {
 public:
  StreamChecksum64();
  ~StreamChecksum64();
  StreamChecksum64(const StreamChecksum64&) = delete;
  StreamChecksum64& operator=(const StreamChecksum64&) = delete;

  /// Starts anew, as if nothing had been added.
  void reset() noexcept;
  void add(std::span<const std::byte> bytes);
  /// checksum64 of all bytes added.
  std::uint64_t value() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace recsdk::internal
