#include "checkpoint/direct_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>

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

int open_direct(int descriptor) noexcept {
#ifdef O_DIRECT
  std::array<char, 32> path{"/proc/self/fd/"};  // no std::string: that may need memory
  std::to_chars(path.data() + std::strlen(path.data()), path.data() + path.size() - 1, descriptor);
  return ::open(path.data(), O_RDONLY | O_DIRECT | O_CLOEXEC);
#else
  return -1;
#endif
}

}  // namespace

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
  struct stat status{};
  const bool is_plain = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const off_t position = is_plain ? lseek(descriptor, 0, SEEK_CUR) : -1;
  if (position < 0) return std::nullopt;
  return (kDirectAlignment - static_cast<std::size_t>(position) % kDirectAlignment) %
         kDirectAlignment;
}

bool is_worth_direct(int descriptor, std::int64_t least) noexcept {
  constexpr std::int64_t kSamples = 8;
  struct stat status{};
  const bool is_plain = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  if (!is_direct_io_wanted() || !is_plain || status.st_size < least) return false;
  for (std::int64_t i = 0; i < kSamples; ++i) {
    if (!is_cached(descriptor, status.st_size / kSamples * i)) return true;
  }
  return false;
}

DirectReader::DirectReader(int descriptor, std::int64_t offset)
    : descriptor_(-1),
      begin_(offset / static_cast<std::int64_t>(kDirectAlignment) *
             static_cast<std::int64_t>(kDirectAlignment)),
      position_(offset),
      memory_(kPieces * kPieceBytes, SIZE_MAX) {
  descriptor_ = open_direct(descriptor);
  is_over_ = descriptor_ < 0;
  if (is_over_) return;
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::exception&) {
    is_over_ = true;  // there is no thread, or no memory for it
  }
}

DirectReader::~DirectReader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (descriptor_ >= 0) close(descriptor_);
}

std::size_t DirectReader::read(std::int64_t offset, std::span<std::byte> bytes) {
  if (offset != position_) return 0;
  std::size_t size = 0;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_filled_ > num_used_ || is_over_; });
    if (num_filled_ == num_used_) return 0;
    size = sizes_[num_used_ % kPieces];
  }
  const auto start = static_cast<std::size_t>(position_ - begin_ -
                                              static_cast<std::int64_t>(num_used_ * kPieceBytes));
  if (start >= size) return 0;
  const std::size_t n = std::min(bytes.size(), size - start);
  std::memcpy(bytes.data(), piece(num_used_) + start, n);
  position_ += static_cast<std::int64_t>(n);
  if (start + n == kPieceBytes) {
    const std::lock_guard lock(mutex_);
    ++num_used_;
    changed_.notify_all();
  }
  return n;
}

// Reads a piece; fewer bytes than it has room for only at the end of the file, or at an error.
std::size_t DirectReader::fill(std::uint64_t number) const noexcept {
  std::size_t done = 0;
  while (done < kPieceBytes) {
    const std::int64_t offset = begin_ + static_cast<std::int64_t>(number * kPieceBytes + done);
    const ssize_t n = ::pread(descriptor_, piece(number) + done, kPieceBytes - done, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
    // What comes short ends the file, or is nothing that can be gone on from.
    if (done % kDirectAlignment != 0) break;
  }
  return done;
}

void DirectReader::serve() noexcept {
  for (std::uint64_t number = 0;; ++number) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return number < num_used_ + kPieces || stopping_; });
      if (stopping_) return;
    }
    const std::size_t size = fill(number);
    const std::lock_guard lock(mutex_);
    sizes_[number % kPieces] = size;
    num_filled_ += static_cast<std::uint64_t>(size > 0);
    is_over_ = size < kPieceBytes;
    changed_.notify_all();
    if (is_over_) return;
  }
}

}  // namespace recsdk::internal
