// Writes and reads bytes of file descriptors.
//
// Large files bypass the page cache. A checkpoint is written once and read once; for copies of its
// pages the system would take fresh memory each time, which costs more time than the disk.
#include <fcntl.h>
#include <sys/uio.h>
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

#include "io/direct_io.h"
#include "io/direct_reader.h"
#include "recsdk/row_file.h"
#include "util/memory.h"
#include "util/owned_here.h"

namespace recsdk {
namespace {

using Bytes = std::span<const std::byte>;

// The most bytes that one call to the system moves.
constexpr std::size_t kMost = std::size_t{64} << 20;
constexpr std::size_t kStageBytes = std::size_t{2} << 20;

[[noreturn, gnu::cold]] void throw_failed(const char* what, const std::string& name, int reason) {
  throw Error(ErrorCode::kCheckpoint, std::string("cannot ") + what + " '" + name +
                                          "': " + std::generic_category().message(reason));
}

// Writes first and second in one call. Returns how many bytes were written, or nothing if the
// system refuses these places and sizes, as it may past the page cache.
std::optional<std::size_t> write_some(int descriptor, Bytes first, Bytes second,
                                      const std::string& name) {
  const auto vector_of = [](Bytes bytes) {
    return iovec{const_cast<std::byte*>(bytes.data()), std::min(bytes.size(), kMost)};
  };
  const std::array<iovec, 2> both = {vector_of(first), vector_of(second)};
  const bool has_first = !first.empty();
  const bool has_second = !second.empty() && first.size() <= kMost;
  for (;;) {
    const ssize_t done = ::writev(descriptor, both.data() + static_cast<int>(!has_first),
                                  static_cast<int>(has_first) + static_cast<int>(has_second));
    if (done > 0) return static_cast<std::size_t>(done);
    if (done == 0) throw_failed("write", name, ENOSPC);  // else this would never end
    if (errno == EINVAL) return std::nullopt;
    if (errno != EINTR) throw_failed("write", name, errno);
  }
}

void write_all(int descriptor, Bytes bytes, const std::string& name) {
  while (!bytes.empty()) {
    const auto done = write_some(descriptor, bytes, {}, name);
    if (!done) throw_failed("write", name, EINVAL);
    bytes = bytes.subspan(*done);
  }
}

}  // namespace

ByteSink::~ByteSink() = default;
ByteSource::~ByteSource() = default;

std::shared_ptr<const std::byte[]> ByteSource::take(std::int64_t /*offset*/, std::size_t /*size*/) {
  return nullptr;
}

// ---- writing -----------------------------------------------------------------------------------

// Writes past the page cache, which needs whole pages in memory and in the file. The user's bytes
// go directly from where they lie if they lie so; others wait until there are whole pages of them.
struct FileSink::Direct {
  explicit Direct(int file) : descriptor_(file), stage_(kStageBytes, SIZE_MAX) {
    is_on_ = internal::set_direct(descriptor_, true);
  }
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;
  ~Direct() { turn_off(); }

  bool is_on() const { return is_on_; }

  void add(Bytes bytes, const std::string& name) {
    while (!bytes.empty()) {
      const std::size_t gap = to_whole_pages(used_);
      if (is_on_ && bytes.size() >= gap + kLeastFromPlace && is_whole_page(bytes.data() + gap)) {
        bytes = bytes.subspan(put_aside(bytes.first(gap)));
        const Bytes pages = bytes.first(bytes.size() / kPage * kPage);
        write(staged(), pages, name);
        used_ = 0;
        bytes = bytes.subspan(pages.size());
      }
      bytes = bytes.subspan(put_aside(bytes));
      if (used_ == stage_.size()) flush(name);
    }
  }

  void flush(const std::string& name) {
    if (used_ % kPage != 0) turn_off();
    write(staged(), {}, name);
    used_ = 0;
  }

 private:
  static constexpr std::size_t kPage = internal::kDirectAlignment;
  static constexpr std::size_t kLeastFromPlace = std::size_t{64} << 10;

  static std::size_t to_whole_pages(std::size_t size) { return (kPage - size % kPage) % kPage; }
  static bool is_whole_page(const std::byte* place) {
    return reinterpret_cast<std::uintptr_t>(place) % kPage == 0;
  }

  void turn_off() noexcept {
    if (is_on_) internal::set_direct(descriptor_, false);
    is_on_ = false;
  }

  Bytes staged() const { return {stage_.data(), used_}; }

  std::size_t put_aside(Bytes bytes) {
    const std::size_t n = std::min(bytes.size(), stage_.size() - used_);
    std::memcpy(stage_.data() + used_, bytes.data(), n);
    used_ += n;
    return n;
  }

  void write(Bytes first, Bytes second, const std::string& name) {
    while (is_on_ && first.size() + second.size() > 0) {
      const auto done = write_some(descriptor_, first, second, name);
      // After a short write the rest may not lie at whole pages.
      if (!done || *done % kPage != 0) turn_off();
      const std::size_t of_first = std::min(done.value_or(0), first.size());
      first = first.subspan(of_first);
      second = second.subspan(done.value_or(0) - of_first);
    }
    write_all(descriptor_, first, name);
    write_all(descriptor_, second, name);
  }

  int descriptor_;
  internal::Pages stage_;
  std::size_t used_ = 0;
  bool is_on_ = false;
};

FileSink::FileSink(int descriptor, std::string name)
    : descriptor_(descriptor),
      name_(std::move(name)),
      may_be_direct_(internal::is_direct_io_wanted()) {}
FileSink::~FileSink() = default;

void FileSink::write(std::span<const std::byte> bytes) {
  num_bytes_ += static_cast<std::int64_t>(bytes.size());
  if (may_be_direct_ && direct_ == nullptr && num_bytes_ > internal::kDirectFrom)
    bytes = begin_direct(bytes);
  if (direct_ != nullptr) return direct_->add(bytes, name_);
  write_all(descriptor_, bytes, name_);
}

// Writes the bytes up to a place where direct writes can begin; returns the rest.
std::span<const std::byte> FileSink::begin_direct(std::span<const std::byte> bytes) {
  const auto gap = internal::bytes_to_direct_place(descriptor_);
  may_be_direct_ = gap.has_value();
  if (!gap || *gap >= bytes.size()) return bytes;
  write_all(descriptor_, bytes.first(*gap), name_);
  try {
    direct_ = std::make_unique<Direct>(descriptor_);
    may_be_direct_ = direct_->is_on();
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

struct FileSource::Ahead {
  Ahead(int descriptor, std::int64_t offset) : reader(std::in_place, descriptor, offset) {}
  internal::OwnedHere<internal::DirectReader> reader;
};

FileSource::FileSource(int descriptor, std::string name)
    : descriptor_(descriptor), name_(std::move(name)) {}
FileSource::~FileSource() = default;

// Chooses, at the first call, how to read. In a child of fork nobody reads ahead.
void FileSource::begin(std::int64_t offset) {
  if (ahead_ != nullptr && !ahead_->reader.is_here()) ahead_.reset();
  if (std::exchange(is_begun_, true) ||
      !internal::is_worth_direct(descriptor_, internal::kDirectFrom))
    return;
  try {
    ahead_ = std::make_unique<Ahead>(descriptor_, offset);
  } catch (const std::exception&) {
    ahead_.reset();  // no memory for it: the page cache does
  }
}

std::size_t FileSource::read(std::int64_t offset, std::span<std::byte> bytes) {
  begin(offset);
  if (ahead_ != nullptr) {
    if (const std::size_t n = ahead_->reader->read(offset, bytes); n > 0) return n;
    ahead_.reset();  // the end, an error, or not what comes next: the system's own way shall say
  }
  fetch_ahead(offset);
  for (;;) {
    const ssize_t done = ::pread(descriptor_, bytes.data(), std::min(bytes.size(), kMost), offset);
    if (done >= 0) return static_cast<std::size_t>(done);
    if (errno != EINTR) throw_failed("read", name_, errno);
  }
}

std::shared_ptr<const std::byte[]> FileSource::take(std::int64_t offset, std::size_t size) {
  begin(offset);
  try {
    return ahead_ == nullptr ? nullptr : ahead_->reader->take(offset, size);
  } catch (const std::exception&) {
    return nullptr;  // no memory for it
  }
}

// Keeps the disk busy while bytes are used: the system itself does not read far enough ahead.
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
