#include "cut/cut_memory.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "util/fork_gate.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kShareOfRows = 8;

}  // namespace

std::int64_t CutMemory::most_to_ready(std::int64_t bytes_of_rows, std::int64_t at_once) noexcept {
  constexpr std::int64_t kMost = std::int64_t{64} << 20;
  // Each band has a chunk that is filled in part.
  constexpr auto kInPart = static_cast<std::int64_t>(CopyMemory::kChunkBytes) * kNumCopyBands;
  const std::int64_t needed = at_once == 0 ? 0 : 2 * at_once + kInPart;
  return std::min({needed, kMost, bytes_of_rows / kShareOfRows});
}

CutMemory::Parts CutMemory::take(std::int64_t num_rows,
                                 std::optional<std::int64_t> max_copy_bytes) {
  const std::lock_guard lock(mutex_);
  complete(kept_, num_rows);
  limit_ = max_copy_bytes.value_or(std::numeric_limits<std::int64_t>::max());
  is_taken_ = true;
  kept_.ticket = ++ticket_;
  return std::exchange(kept_, {});
}

// Makes what there is not yet.
void CutMemory::complete(Parts& parts, std::int64_t num_rows) const {
  if (parts.tracker == nullptr) parts.tracker = std::make_unique<ChangeTracker>(hash_seed_);
  if (parts.pending == nullptr) parts.pending = std::make_unique<RowBits>();
  if (parts.copies == nullptr) parts.copies = std::make_shared<CopyMemory>(kNumCopyBands);
  parts.tracker->grow(num_rows);
  parts.pending->grow(num_rows);
}

// The first cut of a table gives no tracker back, since there was none before it.
void CutMemory::keep(Parts parts, std::int64_t num_rows) noexcept {
  try {
    if (parts.tracker == nullptr) parts.tracker = std::make_unique<ChangeTracker>(hash_seed_);
    parts.tracker->grow(num_rows);
    parts.tracker->clear();
  } catch (const std::exception&) {
    parts.tracker.reset();  // no memory: the next cut asks for it again
  }
  const std::lock_guard lock(mutex_);
  if (parts.ticket != ticket_) return;
  is_taken_ = false;
  ready_rows_ = 0;
  std::swap(kept_, parts);
}

void CutMemory::ready_some(std::int64_t num_rows) noexcept {
  constexpr std::int64_t kShareOfUpdate = 16;
  constexpr auto kChunk = static_cast<std::int64_t>(CopyMemory::kChunkBytes);
  const bool is_small = num_rows * row_bytes_ < kChunk * kShareOfRows;  // a wait would be short
  if (is_small || is_ready(num_rows)) return;
  const std::int64_t most = most_rows();
  const std::int64_t wanted = bytes_for_copies(num_rows);
  std::shared_ptr<CopyMemory> copies;
  std::uint64_t ticket = 0;
  bool is_backed = true;
  try {
    const auto gate = hold_off_fork();
    const std::lock_guard lock(mutex_);
    if (is_taken_) return;
    complete(kept_, num_rows);
    is_backed &= kept_.pending->back_some();
    is_backed &= kept_.tracker->back_some();
    copies = kept_.copies;
    ticket = ticket_;
  } catch (const std::exception&) {
    return;  // no memory: a cut asks for it again, and says so
  }
  std::int64_t num_chunks = bytes_at_once() / kShareOfUpdate / kChunk + 1;
  while (num_chunks > 0 && copies->stock(wanted)) --num_chunks;
  if (num_chunks == 0 || !is_backed) return;
  const auto gate = hold_off_fork();
  const std::lock_guard lock(mutex_);
  if (ticket != ticket_) return;  // a cut has come in between
  ready_rows_ = num_rows;
  ready_most_rows_ = most;
}

CutMemory::Parts CutMemory::forget() noexcept {
  const std::lock_guard lock(mutex_);
  ++ticket_;
  is_taken_ = false;
  ready_rows_ = 0;
  return std::exchange(kept_, {});
}

std::int64_t CutMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  if (kept_.tracker != nullptr) bytes += kept_.tracker->bytes();
  if (kept_.pending != nullptr) bytes += kept_.pending->bytes();
  if (kept_.copies != nullptr) bytes += static_cast<std::int64_t>(kept_.copies->chunk_bytes());
  return bytes;
}

}  // namespace recsdk::internal
