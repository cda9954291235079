#include "eviction/alike_rows.h"

#include <bit>

#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

// By a quarter, where push_back doubles: there may be more of them than rows.
template <typename T>
void grow(std::vector<T>& numbers, std::size_t size) {
  if (size > numbers.capacity()) numbers.reserve(size + size / 4);
  numbers.resize(size);
}

}  // namespace

std::uint64_t hash_of(const RowMeta::Shown& shown) noexcept {
  constexpr std::uint64_t kOdd = 0x9e37'79b9'7f4a'7c15;
  std::uint64_t mixed = static_cast<std::uint64_t>(shown.step) * kOdd;
  for (const std::uint64_t more :
       {static_cast<std::uint64_t>(shown.time), static_cast<std::uint64_t>(shown.count),
        std::uint64_t{std::bit_cast<std::uint32_t>(shown.score)}})
    mixed = (std::rotl(mixed, 29) ^ more) * kOdd;
  return mixed;
}

bool AlikeColumns::is(std::size_t place, const RowMeta::Shown& shown) const noexcept {
  const auto bits = [](float score) { return std::bit_cast<std::uint32_t>(score); };
  return columns_.steps[place] == shown.step &&
         (columns_.times.empty() || columns_.times[place] == shown.time) &&
         (columns_.counts.empty() || columns_.counts[place] == shown.count) &&
         (columns_.scores.empty() || bits(columns_.scores[place]) == bits(shown.score));
}

RowMeta::Shown AlikeColumns::at(std::size_t place) const noexcept {
  return {.step = columns_.steps[place],
          .time = columns_.times.empty() ? 0 : columns_.times[place],
          .count = columns_.counts.empty() ? 0 : columns_.counts[place],
          .score = columns_.scores.empty() ? 0.0F : columns_.scores[place]};
}

void AlikeColumns::set(std::size_t place, const RowMeta::Shown& shown) noexcept {
  columns_.steps[place] = shown.step;
  if (meta_.is_by_time()) columns_.times[place] = shown.time;
  if (meta_.keeps_counts()) columns_.counts[place] = shown.count;
  if (meta_.is_by_score()) columns_.scores[place] = shown.score;
}

// Steps come last: how many of them there are is the size.
void AlikeColumns::add(const RowMeta::Shown& shown) {
  const std::size_t place = columns_.size();
  if (meta_.is_by_time()) grow(columns_.times, place + 1);
  if (meta_.keeps_counts()) grow(columns_.counts, place + 1);
  if (meta_.is_by_score()) grow(columns_.scores, place + 1);
  grow(columns_.steps, place + 1);
  set(place, shown);
}

void AlikeColumns::clear() noexcept {
  columns_.steps.clear();
  columns_.times.clear();
  columns_.counts.clear();
  columns_.scores.clear();
}

std::int64_t AlikeColumns::bytes() const noexcept {
  return static_cast<std::int64_t>(
      (columns_.steps.capacity() + columns_.times.capacity() + columns_.counts.capacity()) *
          sizeof(std::int64_t) +
      columns_.scores.capacity() * sizeof(float));
}

std::uint32_t AlikeRows::find_or_add(const RowMeta::Shown& shown) {
  std::uint32_t& slot = slots_[hash_of(shown) >> (64 - kSlotBits)];
  if (slot < columns_.size() && columns_.is(slot, shown)) return slot;
  slot = static_cast<std::uint32_t>(columns_.size());
  columns_.add(shown);
  return slot;
}

void AlikeRows::take(std::span<const std::uint32_t> rows, const RowNumbers& numbers) {
  columns_.clear();
  of_rows_.clear();
  of_rows_.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) numbers.prefetch_meta(rows[i + kItemsAhead]);
    of_rows_.push_back(find_or_add(meta_.shown(numbers.meta(rows[i]))));
  }
}

}  // namespace recsdk::internal
