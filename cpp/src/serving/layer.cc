#include "serving/layer.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "serving/line_writer.h"

namespace recsdk::internal {
namespace {

/// Fewer than in a file: hardly a key is without a tag, so one that is not there costs a line.
constexpr std::int64_t kRecordsPerLayerLine = 12;

constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;
constexpr int kMostRangeBits = 20;

constexpr FrozenLine kEmptyLine{};

struct Appender {
  std::byte* end;
  void append(std::span<const std::byte> bytes) {
    std::memcpy(end, bytes.data(), bytes.size());
    end += bytes.size();
  }
};

}  // namespace

Image::Image(std::span<const std::byte* const> records, std::int64_t record_bytes,
             std::uint64_t hash_seed, int range_bits)
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
  LineWriter<Appender> lines(lines_end, view_.num_lines, range_bits);
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

Layer::Layer(Pieces pieces, const LayerShape& shape) : pieces_(std::move(pieces)), shape_(shape) {
  nothing_.lines = &kEmptyLine;
  nothing_.num_lines = 1;
  nothing_.hash_seed = shape.hash_seed;
  const auto view_of = [&](const Image& image, bool& has_some) {
    has_some = has_some || !image.is_empty();
    return image.is_empty() ? &nothing_ : &image.view();
  };
  for (const auto& piece : pieces_) {
    rows_.push_back(piece == nullptr ? &nothing_ : view_of(piece->rows, has_rows_));
    erased_.push_back(piece == nullptr ? &nothing_ : view_of(piece->erased, has_erased_));
  }
}

int Layer::range_bits() const { return std::countr_zero(pieces_.size()); }

std::int64_t Layer::num_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& piece : pieces_) bytes += piece == nullptr ? 0 : piece->num_bytes();
  return bytes;
}

int range_bits_for(std::int64_t num_bytes) {
  const auto pieces = static_cast<std::uint64_t>(num_bytes / kPieceBytes);
  return std::clamp(static_cast<int>(std::bit_width(pieces)) - 1, 0, kMostRangeBits);
}

LayerCursor::LayerCursor(Pieces pieces, std::uint64_t hash_seed)
    : pieces_(std::move(pieces)), hash_seed_(hash_seed) {
  find();
}

void LayerCursor::advance() {
  ++(is_erased_ ? erased_ : row_);
  find();
}

void LayerCursor::release(std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) pieces_[i].reset();
}

void LayerCursor::find() {
  record_ = nullptr;
  for (; piece_ < pieces_.size(); ++piece_, row_ = 0, erased_ = 0) {
    if (pieces_[piece_] != nullptr && find_in(*pieces_[piece_])) return;
  }
}

bool LayerCursor::find_in(const Piece& piece) {
  const auto hash_of = [&](const Image& image, std::int64_t number) {
    return frozen_hash(key_of_record(image.record(number)), hash_seed_);
  };
  const bool has_row = row_ < piece.rows.view().num_rows;
  const bool has_erased = erased_ < piece.erased.view().num_rows;
  if (has_row) {
    record_ = piece.rows.record(row_);
    hash_ = hash_of(piece.rows, row_);
    is_erased_ = false;
  }
  if (!has_erased) return has_row;
  const std::uint64_t hash = hash_of(piece.erased, erased_);
  if (has_row && hash_ < hash) return true;
  record_ = piece.erased.record(erased_);
  hash_ = hash;
  is_erased_ = true;
  return true;
}

}  // namespace recsdk::internal
