#include "eviction/alike_rows.h"

#include <bit>

#include "util/prefetch.h"

namespace recsdk::internal {

namespace {

// The first bits are the best mixed.
std::uint64_t hash_of(const RowMeta::Shown& shown) noexcept {
  constexpr std::uint64_t kOdd = 0x9e37'79b9'7f4a'7c15;
  std::uint64_t mixed = static_cast<std::uint64_t>(shown.step) * kOdd;
  for (const std::uint64_t more :
       {static_cast<std::uint64_t>(shown.time), static_cast<std::uint64_t>(shown.count),
        std::uint64_t{std::bit_cast<std::uint32_t>(shown.score)}})
    mixed = (std::rotl(mixed, 29) ^ more) * kOdd;
  return mixed;
}

}  // namespace

// By their bits: minus zero is another number to a function.
bool AlikeRows::is(std::size_t place, const RowMeta::Shown& shown) const noexcept {
  const auto bits = [](float score) { return std::bit_cast<std::uint32_t>(score); };
  return columns_.steps[place] == shown.step &&
         (columns_.times.empty() || columns_.times[place] == shown.time) &&
         (columns_.counts.empty() || columns_.counts[place] == shown.count) &&
         (columns_.scores.empty() || bits(columns_.scores[place]) == bits(shown.score));
}

void AlikeRows::add(const RowMeta::Shown& shown) {
  columns_.steps.push_back(shown.step);
  if (meta_.is_by_time()) columns_.times.push_back(shown.time);
  if (meta_.keeps_counts()) columns_.counts.push_back(shown.count);
  if (meta_.is_by_score()) columns_.scores.push_back(shown.score);
}

std::uint32_t AlikeRows::find_or_add(const RowMeta::Shown& shown) {
  std::uint32_t& slot = slots_[hash_of(shown) >> (64 - kSlotBits)];
  if (slot < columns_.size() && is(slot, shown)) return slot;
  slot = static_cast<std::uint32_t>(columns_.size());
  add(shown);
  return slot;
}

void AlikeRows::take(std::span<const std::uint32_t> rows, const RowNumbers& numbers) {
  columns_.steps.clear();
  columns_.times.clear();
  columns_.counts.clear();
  columns_.scores.clear();
  of_rows_.clear();
  of_rows_.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) numbers.prefetch_meta(rows[i + kItemsAhead]);
    of_rows_.push_back(find_or_add(meta_.shown(numbers.meta(rows[i]))));
  }
}

}  // namespace recsdk::internal
