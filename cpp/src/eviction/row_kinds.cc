#include "eviction/row_kinds.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace recsdk::internal {
namespace {

using WordKinds = std::span<const std::uint32_t, kWordRows>;

std::uint64_t bits_of(std::span<const std::uint8_t> of_kinds, WordKinds kinds) {
  std::uint64_t bits = 0;
  for (std::size_t j = 0; j < kWordRows; ++j) bits |= std::uint64_t{of_kinds[kinds[j]]} << j;
  return bits;
}

}  // namespace

RowKinds::RowKinds(const RowMeta& meta, std::size_t most_kinds)
    : meta_(meta),
      most_kinds_(most_kinds),
      of_rows_(sizeof(std::uint32_t), 0, kSlabBytes),
      columns_(meta) {
  columns_.add({});
  slots_.assign(kFewestSlots, kNone);
}

void RowKinds::grow(std::int64_t num_rows) {
  const std::int64_t needed = (num_rows + kWordRows - 1) / kWordRows * kWordRows;
  if (needed <= num_rows_) return;
  of_rows_.grow(needed);
  num_rows_ = needed;
}

std::size_t RowKinds::slot_of(const RowMeta::Shown& shown) const noexcept {
  return hash_of(shown) >> (64 - std::countr_zero(slots_.size()));
}

std::uint32_t RowKinds::find_or_add(const RowMeta::Shown& shown) {
  for (std::size_t i = slot_of(shown); slots_[i] != kNone; i = (i + 1) % slots_.size()) {
    if (columns_.is(slots_[i], shown)) return slots_[i];
  }
  if (2 * (num_filed_ + 1) > slots_.size()) grow_slots();
  const std::uint32_t kind = add(shown);
  file_slot(kind);
  return kind;
}

std::uint32_t RowKinds::add(const RowMeta::Shown& shown) {
  if (spare_.empty()) {
    columns_.add(shown);
    return static_cast<std::uint32_t>(columns_.size() - 1);
  }
  const std::uint32_t kind = spare_.back();
  spare_.pop_back();
  columns_.set(kind, shown);
  return kind;
}

void RowKinds::file_slot(std::uint32_t kind) noexcept {
  std::size_t i = slot_of(columns_.at(kind));
  while (slots_[i] != kNone) i = (i + 1) % slots_.size();
  slots_[i] = kind;
  ++num_filed_;
}

void RowKinds::grow_slots() {
  std::vector<std::uint32_t> filed(2 * slots_.size(), kNone);
  filed.swap(slots_);
  num_filed_ = 0;
  for (const std::uint32_t kind : filed) {
    if (kind != kNone) file_slot(kind);
  }
}

void RowKinds::learn(std::span<const std::uint32_t> rows, const RowNumbers& numbers,
                     Before& before) {
  before.rows.reserve(rows.size());
  for (const std::uint32_t row : rows) before.rows.emplace_back(row, kind(row));
  if (rows.size() > most_kinds_ - num_kinds()) release(rows, numbers);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) numbers.prefetch_meta(rows[i + kItemsAhead]);
    kind(rows[i]) = find_or_add(meta_.shown(numbers.meta(rows[i])));
  }
}

// Numbers of kinds could run out, so those are given again that only these rows have, or none: then
// there are enough, as each row has one at most.
void RowKinds::release(std::span<const std::uint32_t> rows, const RowNumbers& numbers) {
  for (const std::uint32_t row : rows) kind(row) = kNone;
  keep_only(used_now(numbers));
}

// Calls body(i, bits, kinds) for each word of rows of which some have keys, as bits.
template <typename Body>
void RowKinds::for_used(const RowNumbers& numbers, const Body& body) const {
  for (std::int64_t i = 0; i * kWordRows < numbers.end(); ++i) {
    const std::uint64_t bits = numbers.used_word(i);
    if (bits != 0)
      body(i, bits, std::span<const std::uint32_t, kWordRows>(&kind(i * kWordRows), kWordRows));
  }
}

std::vector<std::uint32_t> RowKinds::used_now(const RowNumbers& numbers) const {
  std::vector<std::uint8_t> is_used(columns_.size(), 0);
  for_used(numbers, [&](std::int64_t /*i*/, std::uint64_t bits, const auto& kinds) {
    if (bits == ~std::uint64_t{0}) {
      for (const std::uint32_t each : kinds) is_used[each] = 1;
    } else {
      for (; bits != 0; bits &= bits - 1)
        is_used[kinds[static_cast<std::size_t>(std::countr_zero(bits))]] = 1;
    }
  });
  is_used[kNone] = 0;
  std::vector<std::uint32_t> used;
  used.reserve(static_cast<std::size_t>(std::count(is_used.begin(), is_used.end(), 1)));
  for (std::size_t each = 0; each < is_used.size(); ++each) {
    if (is_used[each] != 0) used.push_back(static_cast<std::uint32_t>(each));
  }
  return used;
}

void RowKinds::find_used(const RowNumbers& numbers) {
  used_ = used_now(numbers);
  // Of each that is filed anew a quarter was learned since, so few are kept in vain at little cost.
  if (num_kinds() > kFewestSlots + used_.size() + used_.size() / 4) keep_only(used_);
}

// The numbers of all others may be given again.
void RowKinds::keep_only(std::span<const std::uint32_t> kinds) {
  spare_.clear();
  spare_.reserve(columns_.size() - 1 - kinds.size());
  std::size_t next = kNone + 1;
  for (const std::uint32_t each : kinds) {
    for (; next < each; ++next) spare_.push_back(static_cast<std::uint32_t>(next));
    ++next;
  }
  for (; next < columns_.size(); ++next) spare_.push_back(static_cast<std::uint32_t>(next));
  std::fill(slots_.begin(), slots_.end(), kNone);
  num_filed_ = 0;
  for (const std::uint32_t each : kinds) file_slot(each);
}

Columns RowKinds::columns(std::size_t begin, std::size_t most) const {
  Columns found;
  const auto of_used = std::span(used_).subspan(begin, std::min(most, used_.size() - begin));
  const auto take = [&](const auto& from, auto& to) {
    if (from.empty()) return;
    to.reserve(of_used.size());
    for (const std::uint32_t each : of_used) to.push_back(from[each]);
  };
  take(columns_.all().steps, found.steps);
  take(columns_.all().times, found.times);
  take(columns_.all().counts, found.counts);
  take(columns_.all().scores, found.scores);
  return found;
}

void RowKinds::set_places(std::span<const float> places, Before& before) {
  std::vector<float> of_kinds(columns_.size(), 0.0F);
  for (std::size_t i = 0; i < used_.size(); ++i) of_kinds[used_[i]] = places[i] + 0.0F;
  before.places = std::exchange(places_, std::move(of_kinds));
  before.has_places = true;
}

// Of a row is read of which kind it is, and of a kind a byte.
void RowKinds::mark_low(float border, const RowNumbers& numbers, const RowBits& low_rows) const {
  std::vector<std::uint8_t> is_low(columns_.size(), 0);
  for (const std::uint32_t each : used_)
    is_low[each] = static_cast<std::uint8_t>(places_[each] < border);
  for_used(numbers, [&](std::int64_t i, std::uint64_t bits, const auto& kinds) {
    low_rows.word(i) = bits_of(is_low, kinds) & bits;
  });
}

void RowKinds::find_shifted(const RowNumbers& numbers, Before& before) const {
  const auto is_other = [](float a, float b) {
    return std::bit_cast<std::uint32_t>(a) != std::bit_cast<std::uint32_t>(b);
  };
  std::vector<std::uint8_t> is_shifted(columns_.size(), 0);
  for (const std::uint32_t each : used_) {
    if (each < before.places.size())
      is_shifted[each] = static_cast<std::uint8_t>(is_other(before.places[each], places_[each]));
  }
  before.shifted.resize(static_cast<std::size_t>((numbers.end() + kWordRows - 1) / kWordRows));
  for_used(numbers, [&](std::int64_t i, std::uint64_t bits, const auto& kinds) {
    std::uint64_t shifted = 0;
    for (std::size_t j = 0; j < kWordRows; ++j) shifted |= std::uint64_t{is_shifted[kinds[j]]} << j;
    before.shifted[static_cast<std::size_t>(i)] = shifted & bits;
  });
  for (const auto& [row, kind_before] : before.rows) {
    const std::int64_t* const words = numbers.meta(row);
    std::uint64_t& word = before.shifted[static_cast<std::size_t>(row / kWordRows)];
    const bool is_set = is_other(place_before(kind_before, words, before), place(row, words));
    word = is_set ? word | bit_of(row) : word & ~bit_of(row);
  }
}

// Kinds that it has added are of no row again. Rows that it has learned may be of kinds that others
// get meanwhile: the next look learns all of them before it goes by columns.
void RowKinds::take_back(Before& before) noexcept {
  for (const auto& [row, kind_before] : before.rows) kind(row) = kind_before;
  if (before.has_places) places_.swap(before.places);
  spare_.clear();
}

void RowKinds::forget() noexcept {
  for (std::int64_t row = 0; row < num_rows_; ++row) kind(row) = kNone;
  spare_.clear();
  used_.clear();
  places_.clear();
}

std::int64_t RowKinds::bytes() const noexcept {
  return num_rows_ * static_cast<std::int64_t>(sizeof(std::uint32_t)) + columns_.bytes() +
         static_cast<std::int64_t>((slots_.capacity() + spare_.capacity() + used_.capacity()) *
                                       sizeof(std::uint32_t) +
                                   places_.capacity() * sizeof(float));
}

}  // namespace recsdk::internal
