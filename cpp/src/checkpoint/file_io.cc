// Bytes to and from file descriptors.
//
// Large files bypass the page cache: a checkpoint is written once and read once, and the memory
// that the system would take for copies of its pages, fresh each time, costs more than the disk.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <utility>

#include "checkpoint/direct_io.h"
#include "recsdk/row_file.h"
#include "util/memory.h"

namespace recsdk {
namespace {

// What one call to the system moves at most.
constexpr std::size_t kMost = std::size_t{64} << 20;
constexpr std::int64_t kDirectFrom = std::int64_t{8} << 20;
constexpr std::size_t kStageBytes = std::size_t{2} << 20;

[[noreturn, gnu::cold]] void throw_failed(const char* what, const std::string& name, int reason) {
  throw Error(ErrorCode::kCheckpoint, std::string("cannot ") + what + " '" + name +
                                          "': " + std::generic_category().message(reason));
}

// One call of write; how many bytes it took, or nothing if the system refuses these places and
// sizes, as it may past the page cache.
std::optional<std::size_t> write_some(int descriptor, std::span<const std::byte> bytes,
                                      const std::string& name) {
  for (;;) {
    const ssize_t done = ::write(descriptor, bytes.data(), std::min(bytes.size(), kMost));
    if (done > 0) return static_cast<std::size_t>(done);
    if (done == 0) throw_failed("write", name, ENOSPC);  // else this would never end
    if (errno == EINVAL) return std::nullopt;
    if (errno != EINTR) throw_failed("write", name, errno);
  }
}

void write_all(int descriptor, std::span<const std::byte> bytes, const std::string& name) {
  while (!bytes.empty()) {
    const auto done = write_some(descriptor, bytes, name);
    if (!done) throw_failed("write", name, EINVAL);
    bytes = bytes.subspan(*done);
  }
}

}  // namespace

ByteSink::~ByteSink() = default;
ByteSource::~ByteSource() = default;

// ---- writing -----------------------------------------------------------------------------------

// Bytes that wait until there are enough for a write past the page cache.
struct FileSink::Direct {
  explicit Direct(int file) : descriptor(file), stage(kStageBytes, SIZE_MAX) {
    is_on = internal::set_direct(descriptor, true);
  }
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;
  ~Direct() { turn_off(); }

  void turn_off() noexcept {
    if (is_on) internal::set_direct(descriptor, false);
    is_on = false;
  }

  void add(std::span<const std::byte> bytes, const std::string& name) {
    while (!bytes.empty()) {
      const std::size_t n = std::min(bytes.size(), stage.size() - used);
      std::memcpy(stage.data() + used, bytes.data(), n);
      used += n;
      bytes = bytes.subspan(n);
      if (used == stage.size()) flush(name);
    }
  }

  void flush(const std::string& name) {
    std::span<const std::byte> left(stage.data(), std::exchange(used, 0));
    if (left.size() % internal::kDirectAlignment != 0) turn_off();
    while (is_on && !left.empty()) {
      const auto done = write_some(descriptor, left, name);
      if (!done) turn_off();  // after a short write, the rest may lie askew
      left = left.subspan(done.value_or(0));
    }
    write_all(descriptor, left, name);
  }

  int descriptor;
  internal::Pages stage;
  std::size_t used = 0;
  bool is_on = false;
};

FileSink::FileSink(int descriptor, std::string name)
    : descriptor_(descriptor),
      name_(std::move(name)),
      may_be_direct_(internal::is_direct_io_wanted()) {}
FileSink::~FileSink() = default;

void FileSink::write(std::span<const std::byte> bytes) {
  num_bytes_ += static_cast<std::int64_t>(bytes.size());
  if (may_be_direct_ && direct_ == nullptr && num_bytes_ > kDirectFrom) bytes = begin_direct(bytes);
  if (direct_ != nullptr) return direct_->add(bytes, name_);
  write_all(descriptor_, bytes, name_);
}

// Writes what is missing to a place where direct writes can begin; returns the rest.
std::span<const std::byte> FileSink::begin_direct(std::span<const std::byte> bytes) {
  const auto gap = internal::bytes_to_direct_place(descriptor_);
  may_be_direct_ = gap.has_value();
  if (!gap || *gap >= bytes.size()) return bytes;
  write_all(descriptor_, bytes.first(*gap), name_);
  try {
    direct_ = std::make_unique<Direct>(descriptor_);
    may_be_direct_ = direct_->is_on;
  } catch (const std::exception&) {
    may_be_direct_ = false;  // no memory for it
  }
  if (!may_be_direct_) direct_.reset();
  return bytes.subspan(*gap);
}

void FileSink::finish() {
  if (direct_ == nullptr) return;
  direct_->flush(name_);
  direct_.reset();
}

// ---- reading -----------------------------------------------------------------------------------

struct FileSource::Ahead : internal::DirectReader {
  using internal::DirectReader::DirectReader;
};

FileSource::FileSource(int descriptor, std::string name)
    : descriptor_(descriptor), name_(std::move(name)) {}
FileSource::~FileSource() = default;

std::size_t FileSource::read(std::int64_t offset, std::span<std::byte> bytes) {
  if (!std::exchange(is_begun_, true) && internal::is_worth_direct(descriptor_, kDirectFrom)) {
    try {
      ahead_ = std::make_unique<Ahead>(descriptor_, offset);
    } catch (const std::exception&) {
      ahead_.reset();  // no memory for it: the page cache does
    }
  }
  if (ahead_ != nullptr) {
    if (const std::size_t n = ahead_->read(offset, bytes); n > 0) return n;
    ahead_.reset();  // the end, an error, or not what comes next: the system's own way shall say
  }
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
