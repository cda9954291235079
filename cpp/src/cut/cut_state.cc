#include "cut/cut_state.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "cut/update_copies.h"
#include "recsdk/error.h"
#include "rows/file_fields.h"
#include "rows/row_values.h"
#include "util/fork_gate.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kRegionBytes = std::int64_t{1} << 20;
constexpr std::int64_t kChunkBytes = kRegionBytes / 4;  // copied under the locks at a time
constexpr std::int64_t kMaxRegionRows = 65'536;
constexpr std::int64_t kFirstUpdate = std::int64_t{16} << 20;  // taken to copy so much
constexpr std::int64_t kScanRows = std::int64_t{1} << 20;  // looked at under the locks at a time
constexpr std::int64_t kMarkGrain = 16'384;                // words a piece

std::int64_t rows_in(std::int64_t bytes, std::int64_t row_bytes) {
  return std::max<std::int64_t>(bytes / row_bytes, 1);
}

std::int64_t floor_power(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(n)));
}

}  // namespace

PackedRows::PackedRows(const RowLayout& layout) {
  for (const RowField& field : layout.fields) {
    const std::int64_t bytes = file_field(field).row_bytes();
    fields_.push_back(
        {&field, static_cast<std::size_t>(bytes), static_cast<std::size_t>(row_bytes_)});
    row_bytes_ += bytes;
  }
}

void PackedRows::pack(const RowAddresses& addresses, std::int64_t row, std::byte* out) const {
  for (const Field& f : fields_)
    std::memcpy(out + f.offset, field_address(addresses, *f.field, row), f.bytes);
}

CutState::CutState(const RowLayout& layout, const RowNumbers& numbers, const RowStore& rows,
                   std::optional<std::int64_t> max_copy_bytes, std::int64_t bytes_at_once,
                   CutMemory::Parts& parts)
    : numbers_(numbers),
      rows_(rows),
      packed_(layout),
      end_row_(numbers.end()),
      max_copy_bytes_(max_copy_bytes),
      process_(getpid()),
      region_rows_(
          std::min(floor_power(rows_in(kRegionBytes, packed_.row_bytes())), kMaxRegionRows)),
      chunk_rows_(rows_in(kChunkBytes, packed_.row_bytes())),
      band_regions_(end_row_ / region_rows_ / kNumCopyBands + 1),
      pending_(std::move(parts.pending)),
      regions_(static_cast<std::size_t>(end_row_ / region_rows_ + 1)),
      memory_(std::move(parts.copies)),
      most_at_once_(bytes_at_once) {
  const auto most = static_cast<std::size_t>(max_copy_bytes.value_or(INT64_MAX));
  if (memory_->chunk_bytes() > most && !memory_->recycle(*max_copy_bytes))
    memory_ = std::make_shared<CopyMemory>(kNumCopyBands);
}

CutState::~CutState() { close(0); }

std::int64_t CutState::copy_bytes(const RowLayout& layout) {
  return static_cast<std::int64_t>(CopyBlock::bytes_each(PackedRows(layout).row_bytes()));
}

std::int64_t CutState::mark(const RowBits* changed, int max_threads) {
  std::atomic<std::int64_t> total{0};
  const std::int64_t num_words = (end_row_ + kWordRows - 1) / kWordRows;
  parallel_for(num_words, kMarkGrain, max_threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      std::uint64_t bits = numbers_.visible().word(i);
      if (changed != nullptr) bits &= changed->word(i);
      if (bits == 0) continue;
      pending_->word(i) = bits;
      count += std::popcount(bits);
    }
    total.fetch_add(count, std::memory_order_relaxed);
  });
  return total.load();
}

// ---- copies ------------------------------------------------------------------------------------

// An update that alone needs more than the limit goes on as soon as there are no other copies.
bool CutState::has_room(std::int64_t num_bytes) const noexcept {
  const std::int64_t held = copied_bytes_.load();
  return held == 0 || held + num_bytes <= *max_copy_bytes_;
}

// Bytes that must find room before so many rows are copied; 0: they may be copied now. In a child
// of fork nobody reads on.
std::int64_t CutState::bytes_to_wait_for(std::int64_t num_rows) const noexcept {
  if (!max_copy_bytes_ || num_rows == 0) return 0;
  const std::int64_t needed = CopyBlock::bytes_for(num_rows, packed_.row_bytes());
  return has_room(needed) || getpid() != process_ ? 0 : needed;
}

void CutState::wait(std::unique_lock<std::mutex>& lock, std::int64_t num_bytes, CopyWaits& waits) {
  waits.count.fetch_add(1, std::memory_order_relaxed);
  const auto start = std::chrono::steady_clock::now();
  moved_.wait(lock, [&] { return is_closed_ || is_read() || has_room(num_bytes); });
  const auto waited = std::chrono::steady_clock::now() - start;
  waits.nanoseconds.fetch_add(
      static_cast<std::uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count()),
      std::memory_order_relaxed);
}

void CutState::wait_for_room(std::int64_t num_bytes, CopyWaits& waits) {
  std::unique_lock lock(mutex_);
  wait(lock, num_bytes, waits);
}

void CutState::preserve_rows(std::span<const std::uint32_t> row_numbers, CopyWaits& waits) {
  if (row_numbers.empty() || is_read()) return;  // an update may hold the mutex to its end
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_closed_ || is_read()) return;
    std::vector<std::uint32_t> pending;
    for (const std::uint32_t row : row_numbers) {
      if (is_pending(row)) pending.push_back(row);
    }
    const std::int64_t num_bytes = bytes_to_wait_for(static_cast<std::int64_t>(pending.size()));
    if (num_bytes == 0) {
      std::sort(pending.begin(), pending.end());
      return copy_pending(pending);
    }
    wait(lock, num_bytes, waits);
  }
}

// Row numbers ascend.
void CutState::copy_pending(std::span<const std::uint32_t> row_numbers) {
  CopyBlock* block = nullptr;
  std::int64_t num_filled = 0;
  for (std::size_t i = 0; i < row_numbers.size(); ++i) {
    if (block == nullptr) {
      const std::int64_t region = row_numbers[i] / region_rows_;
      const auto end =
          std::find_if(row_numbers.begin() + static_cast<std::ptrdiff_t>(i), row_numbers.end(),
                       [&](std::uint32_t row) { return row / region_rows_ != region; });
      block = make_block(region, end - row_numbers.begin() - static_cast<std::ptrdiff_t>(i));
      num_filled = 0;
    }
    if (i + kRowsAhead < row_numbers.size()) fetch(row_numbers[i + kRowsAhead]);
    fill(*block, num_filled++, row_numbers[i]);
    if (num_filled < block->count) continue;
    publish(*block);
    block = nullptr;
  }
}

// For copies of rows of one region, `most` or fewer. Several threads may do this at once.
CutState::CopyBlock* CutState::make_block(std::int64_t region, std::int64_t most) {
  CopyBlock* const block = CopyBlock::make(*memory_, band_of(region), most, packed_.row_bytes());
  const std::int64_t held = copied_bytes_.fetch_add(block->bytes()) + block->bytes();
  std::int64_t before = max_copied_bytes_.load();
  while (before < held && !max_copied_bytes_.compare_exchange_weak(before, held)) {
  }
  return block;
}

// Prefetches what fill reads; of a long record the first lines, as the processor sees the pattern.
void CutState::fetch(std::uint32_t row) const noexcept {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kMost = 8 * kLine;
  const RowAddresses addresses = rows_.records();
  const std::byte* const record = addresses.record(row);
  for (std::int64_t i = 0; i < std::min(addresses.stride, kMost); i += kLine)
    prefetch_line(record + i);
  if (addresses.scalar_stride > 0) prefetch_line(addresses.scalars(row));
  prefetch_line(numbers_.keys().record(row));
}

// Copies a row, which is no longer pending then.
void CutState::fill(CopyBlock& block, std::int64_t i, std::uint32_t row) noexcept {
  block.rows()[i] = row;
  block.keys()[i] = numbers_.key(row);
  packed_.pack(rows_.records(), row, block.packed(i));
  pending_->clear(row);
}

// Gives a block that is full to the reader. Several threads may do this at once.
void CutState::publish(CopyBlock& block) noexcept {
  const std::int64_t region = block.rows()[0] / region_rows_;
  const std::atomic_ref first(regions_[static_cast<std::size_t>(region)]);
  block.next = first.load(std::memory_order_relaxed);
  while (!first.compare_exchange_weak(block.next, &block)) {
  }
}

// Frees the copies of bands that end in these regions.
void CutState::free_bands(std::int64_t begin_region, std::int64_t end_region) noexcept {
  const auto num_regions = static_cast<std::int64_t>(regions_.size());
  for (std::int64_t region = begin_region; region < end_region; ++region) {
    regions_[static_cast<std::size_t>(region)] = nullptr;
    const bool is_last = region + 1 == num_regions || band_of(region + 1) != band_of(region);
    if (is_last) copied_bytes_ -= memory_->release(band_of(region));
  }
}

std::int64_t CutState::bytes_to_stock() const noexcept {
  const std::int64_t row_bytes = packed_.row_bytes();
  const std::int64_t left = (end_row_ - position_.load()) * row_bytes;
  const std::int64_t at_once = most_at_once_.load();
  std::int64_t bytes =
      CutMemory::most_to_ready(end_row_ * row_bytes, at_once > 0 ? at_once : kFirstUpdate);
  bytes = std::min(bytes, left);
  if (max_copy_bytes_) bytes = std::min(bytes, *max_copy_bytes_ - copied_bytes_.load());
  return std::max<std::int64_t>(bytes, 0);
}

bool CutState::stock() noexcept {
  std::shared_ptr<CopyMemory> memory;
  {
    const auto gate = hold_off_fork();
    const std::lock_guard lock(mutex_);
    memory = memory_;
  }
  return memory != nullptr && memory->stock(bytes_to_stock());
}

std::int64_t CutState::spare_bytes() const {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return 0;
  const auto chunks = static_cast<std::int64_t>(memory_->chunk_bytes());
  return pending_->bytes() + std::max<std::int64_t>(chunks - copied_bytes(), 0) +
         static_cast<std::int64_t>(meta_.words.capacity() * sizeof(std::int64_t));
}

CutMemory::Parts CutState::close(std::int64_t keep_bytes) noexcept {
  CutMemory::Parts parts;  // cleaned and freed when no update waits for the lock
  std::vector<CopyBlock*> regions;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    copied_bytes_ = 0;
    parts.copies = std::move(memory_);
    parts.pending = std::move(pending_);
    regions.swap(regions_);
    meta_ = {};
  }
  moved_.notify_all();
  if (parts.pending != nullptr) parts.pending->clear_all();
  const std::int64_t most = max_copy_bytes_ ? std::min(keep_bytes, *max_copy_bytes_) : keep_bytes;
  if (parts.copies != nullptr && !parts.copies->recycle(most)) parts.copies.reset();
  return parts;
}

// ---- reading -----------------------------------------------------------------------------------

void CutState::throw_closed() {
  throw Error(ErrorCode::kBusy, "the cut was finished while it was read; take another one");
}

std::int64_t CutState::read(const RowArrays& arrays) {
  std::int64_t n = 0;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) throw_closed();
    const std::int64_t begin = position_.load();
    const std::int64_t end = take(begin, std::min(arrays.capacity, chunk_rows_));
    emit(arrays);
    emit_meta(arrays);
    n = static_cast<std::int64_t>(taken_.size());
    num_read_ += taken_.size();
    for (const Taken& taken : taken_) pending_->clear(taken.row);
    const std::int64_t end_region =
        end < end_row_ ? end / region_rows_ : end_row_ / region_rows_ + 1;
    free_bands(begin / region_rows_, end_region);
    position_.store(end);
  }
  moved_.notify_all();
  return n;
}

// Fills taken_ with up to `most` rows from `begin` on; returns where to go on. Changes nothing
// else.
std::int64_t CutState::take(std::int64_t begin, std::int64_t most) {
  taken_.clear();
  taken_.reserve(static_cast<std::size_t>(most));
  const std::int64_t last = std::min(end_row_, begin + kScanRows);
  while (begin < last && static_cast<std::int64_t>(taken_.size()) < most) {
    const std::int64_t end = std::min(end_row_, (begin / region_rows_ + 1) * region_rows_);
    gather_copies(begin, end);
    take_region(begin, end, static_cast<std::size_t>(most));
    const bool is_full = static_cast<std::int64_t>(taken_.size()) == most;
    begin = is_full ? std::int64_t{taken_.back().row} + 1 : end;
  }
  return begin;
}

void CutState::gather_copies(std::int64_t begin, std::int64_t end) {
  copies_.clear();
  const CopyBlock* block = regions_[static_cast<std::size_t>(begin / region_rows_)];
  for (; block != nullptr; block = block->next) {
    for (std::int64_t i = 0; i < block->count; ++i) {
      const std::int64_t row = block->rows()[i];
      if (row >= begin && row < end)
        copies_.push_back({block->rows()[i], block->keys()[i], block->packed(i)});
    }
  }
  std::sort(copies_.begin(), copies_.end(),
            [](const Taken& a, const Taken& b) { return a.row < b.row; });
}

// Merges the copies with the rows that are still pending.
void CutState::take_region(std::int64_t begin, std::int64_t end, std::size_t most) {
  auto copy = copies_.begin();
  const auto take_copies_below = [&](std::int64_t row) {
    for (; copy != copies_.end() && copy->row < row && taken_.size() < most; ++copy)
      taken_.push_back(*copy);
  };
  for (std::int64_t base = begin / kWordRows * kWordRows; base < end; base += kWordRows) {
    std::uint64_t bits = pending_->word(base / kWordRows);
    if (base < begin) bits &= ~(bit_of(begin) - 1);  // of a region that may be taken already
    if (end - base < kWordRows) bits &= bit_of(end) - 1;
    for (; bits != 0; bits &= bits - 1) {
      const std::int64_t row = base + std::countr_zero(bits);
      take_copies_below(row);
      if (taken_.size() == most) return;
      taken_.push_back({static_cast<std::uint32_t>(row), numbers_.key(row), nullptr});
    }
  }
  take_copies_below(end);
}

void CutState::emit(const RowArrays& arrays) const {
  for (std::size_t i = 0; i < taken_.size(); ++i) arrays.keys[i] = taken_[i].key;
  const RowAddresses addresses = rows_.records();
  for (std::size_t f = 0; f < packed_.fields().size(); ++f) {
    const PackedRows::Field& field = packed_.fields()[f];
    std::byte* out = arrays.fields[f];
    for (const Taken& taken : taken_) {
      const std::byte* const source = taken.copy == nullptr
                                          ? field_address(addresses, *field.field, taken.row)
                                          : taken.copy + field.offset;
      std::memcpy(out, source, field.bytes);
      out += field.bytes;
    }
  }
}

// Rows are taken in the order in which their metadata lie.
void CutState::emit_meta(const RowArrays& arrays) const {
  const std::size_t num_words = meta_.bytes.size();
  for (std::size_t w = 0; w < num_words; ++w) {
    const std::size_t bytes = meta_.bytes[w];
    std::byte* const out = arrays.fields[packed_.fields().size() + w];
    for (std::size_t i = 0; i < taken_.size(); ++i)
      std::memcpy(out + i * bytes, &meta_.words[(num_read_ + i) * num_words + w], bytes);
  }
}

}  // namespace recsdk::internal
