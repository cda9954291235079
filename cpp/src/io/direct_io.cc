#include "io/direct_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace recsdk::internal {
namespace {

// Whether the byte at an offset can be read without waiting for the disk.
bool is_cached(int descriptor, std::int64_t offset) noexcept {
#ifdef RWF_NOWAIT
  char byte = 0;
  iovec place{&byte, 1};
  return preadv2(descriptor, &place, 1, offset, RWF_NOWAIT) == 1;
#else
  return false;
#endif
}

}  // namespace

std::optional<std::int64_t> size_of_plain_file(int descriptor) noexcept {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  return status.st_size;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

Descriptor open_direct(int descriptor) noexcept {
#ifdef O_DIRECT
  std::array<char, 32> path{"/proc/self/fd/"};  // no std::string: that may need memory
  std::to_chars(path.data() + std::strlen(path.data()), path.data() + path.size() - 1, descriptor);
  return Descriptor(::open(path.data(), O_RDONLY | O_DIRECT | O_CLOEXEC));
#else
  return {};
#endif
}

bool is_direct_io_wanted() {
  const char* const value = std::getenv("RECSDK_DIRECT_IO");
  return value == nullptr || std::strcmp(value, "0") != 0;
}

bool set_direct(int descriptor, bool is_on) noexcept {
#ifdef O_DIRECT
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0) return false;
  return fcntl(descriptor, F_SETFL, is_on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
#else
  return !is_on;
#endif
}

std::optional<std::size_t> bytes_to_direct_place(int descriptor) noexcept {
  const off_t position = size_of_plain_file(descriptor) ? lseek(descriptor, 0, SEEK_CUR) : -1;
  if (position < 0) return std::nullopt;
  return (kDirectAlignment - static_cast<std::size_t>(position) % kDirectAlignment) %
         kDirectAlignment;
}

bool is_worth_direct(int descriptor, std::int64_t least) noexcept {
  constexpr std::int64_t kSamples = 8;
  const std::optional<std::int64_t> size = size_of_plain_file(descriptor);
  if (!is_direct_io_wanted() || !size || *size < least) return false;
  for (std::int64_t i = 0; i < kSamples; ++i) {
    if (!is_cached(descriptor, *size / kSamples * i)) return true;
  }
  return false;
}

}  // namespace recsdk::internal
