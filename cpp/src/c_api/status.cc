#include "c_api/status.h"

#include <cstddef>
#include <cstring>

namespace recsdk::c_api {
namespace {

constexpr std::size_t kMessageBytes = 1024;
thread_local char last_message[kMessageBytes] = "";

/// The length of the longest part of `message` that fits and does not end within a UTF-8 sequence.
std::size_t fitting_length(const char* message) {
  const std::size_t length = std::strlen(message);
  if (length < kMessageBytes) return length;
  std::size_t cut = kMessageBytes - 1;
  while (cut > 0 && (static_cast<unsigned char>(message[cut]) & 0xC0U) == 0x80U) --cut;
  return cut;
}

}  // namespace

int fail(ErrorCode code, const char* message) noexcept {
  const std::size_t length = fitting_length(message);
  std::memcpy(last_message, message, length);
  last_message[length] = '\0';
  return static_cast<int>(code);
}

}  // namespace recsdk::c_api

const char* recsdk_last_error_message(void) { return recsdk::c_api::last_message; }
