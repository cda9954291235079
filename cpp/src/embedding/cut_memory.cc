#include "embedding/cut_memory.h"

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
  return std::min({2 * at_once, kMost, bytes_of_rows / kShareOfRows});
}

CutMemory::Parts CutMemory::take(std::int64_t num_rows) {
  Parts parts;
  {
    const std::lock_guard lock(mutex_);
    complete(kept_, num_rows);
    is_taken_ = true;
    parts = std::exchange(kept_, {});
  }
  return parts;
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
  const auto replace = [](auto& kept, auto& given, const auto& size_of) {
    if (given != nullptr && (kept == nullptr || size_of(*given) >= size_of(*kept)))
      kept.swap(given);
  };
  const auto bytes_of = [](const auto& part) { return part.bytes(); };
  const std::lock_guard lock(mutex_);
  is_taken_ = false;
  ready_rows_ = 0;
  replace(kept_.tracker, parts.tracker, bytes_of);
  replace(kept_.pending, parts.pending, bytes_of);
  replace(kept_.copies, parts.copies, [](const CopyMemory& c) { return c.chunk_bytes(); });
}

void CutMemory::ready_some(std::int64_t num_rows) noexcept {
  constexpr std::int64_t kShareOfUpdate = 16;
  constexpr auto kChunk = static_cast<std::int64_t>(CopyMemory::kChunkBytes);
  const bool is_small = num_rows * row_bytes_ < kChunk * kShareOfRows;  // a wait would be short
  if (is_small || is_ready(num_rows)) return;
  const std::int64_t most = most_rows();
  const std::int64_t wanted = bytes_for_copies(num_rows);
  std::shared_ptr<CopyMemory> copies;
  bool is_backed = true;
  try {
    const auto gate = hold_off_fork();
    const std::lock_guard lock(mutex_);
    if (is_taken_) return;
    complete(kept_, num_rows);
    is_backed &= kept_.pending->back_some();
    is_backed &= kept_.tracker->back_some();
    copies = kept_.copies;
  } catch (const std::exception&) {
    return;  // no memory: a cut asks for it again, and says so
  }
  std::int64_t num_chunks = bytes_at_once() / kShareOfUpdate / kChunk + 1;
  while (num_chunks > 0 && copies->stock(wanted)) --num_chunks;
  if (num_chunks == 0 || !is_backed) return;
  ready_rows_ = num_rows;
  ready_most_rows_ = most;
}

CutMemory::Parts CutMemory::forget() noexcept {
  const std::lock_guard lock(mutex_);
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
