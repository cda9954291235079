#include "embedding/cut_memory.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace recsdk::internal {

std::int64_t CutMemory::most_to_ready(std::int64_t bytes_of_rows, std::int64_t at_once) noexcept {
  constexpr std::int64_t kMost = std::int64_t{64} << 20;
  constexpr std::int64_t kShare = 16;
  return std::min({2 * at_once, kMost, bytes_of_rows / kShare});
}

CutMemory::Parts CutMemory::take(std::int64_t num_rows) {
  Parts parts;
  {
    const std::lock_guard lock(mutex_);
    parts = std::exchange(kept_, {});
  }
  if (parts.tracker == nullptr) parts.tracker = std::make_unique<ChangeTracker>(hash_seed_);
  if (parts.pending == nullptr) parts.pending = std::make_unique<RowBits>();
  if (parts.copies == nullptr) parts.copies = std::make_shared<CopyMemory>(kNumCopyBands);
  parts.tracker->grow(num_rows);
  parts.pending->grow(num_rows);
  return parts;
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
  replace(kept_.tracker, parts.tracker, bytes_of);
  replace(kept_.pending, parts.pending, bytes_of);
  replace(kept_.copies, parts.copies, [](const CopyMemory& c) { return c.chunk_bytes(); });
}

void CutMemory::prepare(std::int64_t num_rows) {
  Parts parts = take(num_rows);
  parts.pending->clear_all();
  while (parts.copies->stock(bytes_for_copies(num_rows))) {
  }
  keep(std::move(parts), num_rows);
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
