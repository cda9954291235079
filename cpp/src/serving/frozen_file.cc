#include "serving/frozen_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

#include "io/checksum.h"
#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

/// Closed at the end of a scope: a mapping does not need it.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }

 private:
  int number_;
};

std::string system_reason() { return std::generic_category().message(errno); }

std::span<const std::byte> bytes_of(const void* memory, std::int64_t size) {
  return {static_cast<const std::byte*>(memory), static_cast<std::size_t>(size)};
}

}  // namespace

FrozenFile::FrozenFile(const std::string& path) : path_(path) {
  map();
  try {
    check();
  } catch (...) {
    munmap(memory_, size_);
    throw;
  }
  const FrozenHeader& head = header();
  const auto* const start = static_cast<const std::byte*>(memory_);
  view_.lines = reinterpret_cast<const FrozenLine*>(start + kFrozenHeaderBytes);
  view_.records = start + frozen_records_offset(head.num_lines);
  view_.num_lines = head.num_lines;
  view_.num_rows = head.num_rows;
  view_.record_bytes = kKeyBytes + head.row_bytes;
  view_.hash_seed = head.hash_seed;
}

FrozenFile::~FrozenFile() {
  if (memory_ != nullptr) munmap(memory_, size_);
}

FrozenFile::FrozenFile(FrozenFile&& other) noexcept
    : path_(std::move(other.path_)),
      memory_(std::exchange(other.memory_, nullptr)),
      size_(other.size_),
      view_(other.view_) {}

void FrozenFile::refuse(const std::string& reason) const {
  throw Error(ErrorCode::kCheckpoint, path_ + ": " + reason);
}

void FrozenFile::map() {
  // A pipe in the place of a file must not be waited for.
  const Descriptor file(open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) refuse("opening it failed: " + system_reason());
  struct stat status = {};
  if (fstat(file.get(), &status) != 0) refuse("looking at it failed: " + system_reason());
  if (!S_ISREG(status.st_mode)) refuse("is no plain file");
  if (status.st_size < kFrozenHeaderBytes) {
    refuse("has " + std::to_string(status.st_size) + " bytes, and the header of a frozen file " +
           std::to_string(kFrozenHeaderBytes) + "; it was cut short, or is another file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* const memory = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) refuse("mapping it failed: " + system_reason());
  memory_ = memory;
  madvise(memory_, size_,
          MADV_HUGEPAGE);  // where the file system can do that; else it does nothing
}

void FrozenFile::check() const {
  const FrozenHeader& head = header();
  if (std::memcmp(head.magic, kFrozenMagic, sizeof(kFrozenMagic)) != 0)
    refuse("is no frozen file: it does not begin with RECSDKFZ");
  if (head.byte_order != kFrozenByteOrder) refuse("its header says another order of bytes");
  if (head.version != kFrozenVersion) {
    refuse("is of version " + std::to_string(head.version) + " of the format, and this reads " +
           std::to_string(kFrozenVersion) + "; update recsdk, or freeze the table anew");
  }
  if (checksum64(bytes_of(memory_, offsetof(FrozenHeader, checksum))) != head.checksum)
    refuse("the checksum of its header does not match; it was changed");
  check_sizes();
}

void FrozenFile::check_sizes() const {
  const FrozenHeader& head = header();
  const auto wrong = [&](const char* field, std::int64_t value) {
    refuse(std::string("its header has ") + field + " " + std::to_string(value) +
           ", which cannot be");
  };
  if (head.dtype >= kNumFrozenDTypes) wrong("dtype", head.dtype);
  if (head.dim < 1 || head.dim > kMaxFrozenDim) wrong("dim", head.dim);
  if (head.row_bytes != frozen_row_bytes(static_cast<FrozenDType>(head.dtype), head.dim))
    wrong("row_bytes", head.row_bytes);
  if (head.num_rows < 0 || head.num_rows > kMaxFrozenRows) wrong("num_rows", head.num_rows);
  if (head.num_lines != frozen_lines(head.num_rows)) wrong("num_lines", head.num_lines);
  if (head.num_shards < 1 || head.num_shards > kMaxFrozenShards)
    wrong("num_shards", head.num_shards);
  if (head.shard >= head.num_shards) wrong("shard", head.shard);
  if (head.name_bytes < 1 || head.name_bytes > kMaxFrozenName) wrong("name_bytes", head.name_bytes);
  if (std::isnan(head.default_value)) refuse("its default value is not a number");
  if (head.num_shared < 0 || head.num_shared > kMaxFrozenShared)
    wrong("num_shared", head.num_shared);
  const std::int64_t expected =
      frozen_records_offset(head.num_lines) +
      (head.num_rows + shared_range().size()) * (kKeyBytes + head.row_bytes);
  if (head.file_bytes != expected) wrong("file_bytes", head.file_bytes);
  if (static_cast<std::int64_t>(size_) != expected) {
    refuse("has " + std::to_string(size_) + " bytes, " + std::to_string(expected) +
           " were written; it was cut short or changed");
  }
}

void FrozenFile::verify() const {
  const FrozenHeader& head = header();
  const auto index = bytes_of(view_.lines, head.num_lines * std::int64_t{sizeof(FrozenLine)});
  if (checksum64(index) != head.index_checksum)
    refuse("the checksum of its index does not match; it was changed");
  if (checksum64(bytes_of(view_.records, head.num_rows * view_.record_bytes)) !=
      head.records_checksum)
    refuse("the checksum of its records does not match; it was changed");
  if (head.num_shared == 0) return;
  const std::int64_t shared_bytes = shared_range().size() * view_.record_bytes;
  if (checksum64(bytes_of(shared_record(0), shared_bytes)) != head.shared_checksum)
    refuse("the checksum of its shared rows does not match; it was changed");
}

void FrozenFile::preload() const noexcept {
#if defined(MADV_POPULATE_READ)
  if (madvise(memory_, size_, MADV_POPULATE_READ) == 0) return;
#endif
  madvise(memory_, size_, MADV_WILLNEED);
}

}  // namespace recsdk::internal
