#include "keymap/dense_pages.h"

#include <algorithm>
#include <string>
#include <utility>

#include "recsdk/error.h"

namespace recsdk::internal {

std::int64_t DensePages::bytes() const noexcept {
  return static_cast<std::int64_t>(arena_.bytes_held() + entries_.capacity() * sizeof(Entry));
}

std::uint32_t DensePages::count(std::uint64_t id) const {
  return entries_.empty() ? 0 : entries_[place_of(id)].count;
}

void DensePages::add(std::uint64_t id) {
  if (entries_.empty()) entries_.resize(16);
  if (static_cast<std::size_t>(num_pages_ + 1) * 2 > entries_.size()) {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.page != nullptr) entries_[place_of(entry.id)] = entry;
    }
  }
  std::uint32_t units = kPageUnits;
  auto* const page = reinterpret_cast<Page*>(arena_.allocate(units));
  std::fill_n(page->rows, kPageKeys, kNoRow);
  entries_[place_of(id)] = {id, page, 0};
  ++num_pages_;
}

void DensePages::insert(Key key, std::uint32_t row) noexcept {
  Entry& entry = entries_[place_of(id_of(key))];
  entry.page->rows[slot_of(key)] = row;
  ++entry.count;
  ++num_keys_;
}

std::optional<std::uint32_t> DensePages::erase(Key key) noexcept {
  const std::size_t place = place_of(id_of(key));
  Entry& entry = entries_[place];
  std::uint32_t& slot = entry.page->rows[slot_of(key)];
  if (slot == kNoRow) return std::nullopt;
  const std::uint32_t row = slot;
  slot = kNoRow;
  --num_keys_;
  if (--entry.count == 0) remove(place);
  return row;
}

// Entries behind the removed one move up where their search would otherwise end at the gap.
void DensePages::remove(std::size_t place) noexcept {
  arena_.free(reinterpret_cast<std::byte*>(entries_[place].page), kPageUnits);
  --num_pages_;
  const std::size_t mask = entries_.size() - 1;
  std::size_t gap = place;
  for (std::size_t i = (gap + 1) & mask; entries_[i].page != nullptr; i = (i + 1) & mask) {
    const std::size_t home = mix64(entries_[i].id) & mask;
    if (((i - home) & mask) >= ((i - gap) & mask)) {
      entries_[gap] = entries_[i];
      gap = i;
    }
  }
  entries_[gap] = {};
}

void DensePages::clear() noexcept {
  entries_.clear();
  entries_.shrink_to_fit();
  arena_.clear();
  num_pages_ = 0;
  num_keys_ = 0;
}

void DensePages::swap(DensePages& other) noexcept {
  entries_.swap(other.entries_);
  arena_.swap(other.arena_);
  std::swap(num_pages_, other.num_pages_);
  std::swap(num_keys_, other.num_keys_);
}

void DensePages::check_invariants() const {
  const auto check = [](bool holds, const char* what) {
    if (!holds) throw Error(ErrorCode::kInternal, std::string("index invariant broken: ") + what);
  };
  std::int64_t num_pages = 0;
  std::int64_t num_keys = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.page == nullptr) continue;
    ++num_pages;
    num_keys += entry.count;
    check(place_of(entry.id) == i, "a dense page cannot be reached");
    check(entry.count > 0, "a dense page is empty");
    check(std::count(entry.page->rows, entry.page->rows + kPageKeys, kNoRow) ==
              static_cast<std::int64_t>(kPageKeys - entry.count),
          "a dense page's count of keys is wrong");
  }
  check(num_pages == num_pages_ && num_keys == num_keys_, "the count of dense keys is wrong");
}

}  // namespace recsdk::internal
