// What the last failed call of a thread said, for the C interfaces.
#pragma once

#include <cstddef>
#include <cstring>

namespace recsdk::internal {

/// A message of up to 1023 bytes. A longer one is cut, between two characters of UTF-8. Allocates
/// nothing.
class LastMessage {
 public:
  void set(const char* message) noexcept {
    const std::size_t length = fitting_length(message);
    std::memcpy(bytes_, message, length);
    bytes_[length] = '\0';
  }
  /// "" if none was set.
  const char* text() const noexcept { return bytes_; }

 private:
  static constexpr std::size_t kBytes = 1024;

  static std::size_t fitting_length(const char* message) noexcept {
    const std::size_t length = std::strlen(message);
    if (length < kBytes) return length;
    std::size_t cut = kBytes - 1;
    while (cut > 0 && (static_cast<unsigned char>(message[cut]) & 0xC0U) == 0x80U) --cut;
    return cut;
  }

  char bytes_[kBytes] = "";
};

}  // namespace recsdk::internal
