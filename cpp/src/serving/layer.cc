#include "serving/layer.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

#include "serving/line_writer.h"

namespace recsdk::internal {
namespace {

/// Fewer than in a file: hardly a key is without a tag, so one that is not there costs a line.
constexpr std::int64_t kRecordsPerLayerLine = 12;

struct Appender {
  std::byte* end;
  void append(std::span<const std::byte> bytes) {
    std::memcpy(end, bytes.data(), bytes.size());
    end += bytes.size();
  }
};

}  // namespace

Image::Image(std::span<const std::byte* const> records, std::int64_t record_bytes,
             std::uint64_t hash_seed)
    : Image() {  // what throws below is destroyed
  view_.num_rows = std::ssize(records);
  view_.num_lines = view_.num_rows / kRecordsPerLayerLine + 1;
  view_.record_bytes = record_bytes;
  view_.hash_seed = hash_seed;
  const std::int64_t line_bytes = view_.num_lines * std::int64_t{sizeof(FrozenLine)};
  size_ = static_cast<std::size_t>(line_bytes + view_.num_rows * record_bytes);
  memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    throw std::bad_alloc();
  }
  madvise(memory_, size_, MADV_HUGEPAGE);
  auto* const start = static_cast<std::byte*>(memory_);
  view_.lines = reinterpret_cast<const FrozenLine*>(start);
  view_.records = start + line_bytes;
  Appender lines_end{start};
  Appender records_end{start + line_bytes};
  LineWriter<Appender> lines(lines_end, view_.num_lines);
  for (const std::byte* const record : records) {
    lines.add(frozen_hash(key_of_record(record), hash_seed));
    records_end.append({record, static_cast<std::size_t>(record_bytes)});
  }
  lines.finish();
}

Image::~Image() {
  if (memory_ != nullptr) munmap(memory_, size_);
}

Image::Image(Image&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      view_(std::exchange(other.view_, {})) {}

Image& Image::operator=(Image&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  std::swap(view_, other.view_);
  return *this;
}

void LayerCursor::find() {
  const auto hash_of = [](const Image& image, std::int64_t number) {
    return frozen_hash(key_of_record(image.record(number)), image.view().hash_seed);
  };
  const bool has_row = row_ < layer_.rows.view().num_rows;
  const bool has_erased = erased_ < layer_.erased.view().num_rows;
  record_ = nullptr;
  if (has_row) {
    record_ = layer_.rows.record(row_);
    hash_ = hash_of(layer_.rows, row_);
    is_erased_ = false;
  }
  if (!has_erased) return;
  const std::uint64_t hash = hash_of(layer_.erased, erased_);
  if (has_row && hash_ < hash) return;
  record_ = layer_.erased.record(erased_);
  hash_ = hash;
  is_erased_ = true;
}

}  // namespace recsdk::internal
