// Bytes to and from file descriptors.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "recsdk/row_file.h"

namespace recsdk {
namespace {

// What one call to the system moves at most.
constexpr std::size_t kMost = std::size_t{64} << 20;

[[noreturn, gnu::cold]] void throw_failed(const char* what, const std::string& name, int reason) {
  throw Error(ErrorCode::kCheckpoint, std::string("cannot ") + what + " '" + name +
                                          "': " + std::generic_category().message(reason));
}

}  // namespace

ByteSink::~ByteSink() = default;
ByteSource::~ByteSource() = default;

void FileSink::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMost));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_failed("write", name_, errno);
    if (done == 0) throw_failed("write", name_, ENOSPC);  // else this would never end
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

std::size_t FileSource::read(std::int64_t offset, std::span<std::byte> bytes) {
  fetch_ahead(offset);
  for (;;) {
    const ssize_t done = ::pread(descriptor_, bytes.data(), std::min(bytes.size(), kMost), offset);
    if (done >= 0) return static_cast<std::size_t>(done);
    if (errno != EINTR) throw_failed("read", name_, errno);
  }
}

// Keeps the disk at work while bytes are used: the system's own reading ahead is too short for
// that.
void FileSource::fetch_ahead(std::int64_t offset) noexcept {
  constexpr std::int64_t kWindow = std::int64_t{16} << 20;
  constexpr std::int64_t kStep = kWindow / 4;
  if (offset < fetched_ - kWindow || offset > fetched_) fetched_ = offset;
  if (fetched_ - offset > kWindow - kStep) return;
  const std::int64_t end = offset + kWindow;
  posix_fadvise(descriptor_, fetched_, end - fetched_, POSIX_FADV_WILLNEED);  // best effort
  fetched_ = end;
}

}  // namespace recsdk
