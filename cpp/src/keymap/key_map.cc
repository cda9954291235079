#include "keymap/key_map.h"

#include <algorithm>
#include <string>
#include <utility>

#include "recsdk/error.h"
#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kToldApart = 1024;  // keys that are told apart before those hashed are found

// A range is worth a page from half full on: 8 bytes a key, half of what the hash takes.
constexpr std::int64_t kWorthAPage = DensePages::kPageKeys / 2;
constexpr std::int64_t kInsertionsAnInspection = 1024;
constexpr std::int64_t kInsertionsAnAdoption = 512;

}  // namespace

void KeyMap::find(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const {
  if (dense_.empty()) {
    hashed_.find(keys, rows, outcomes);
    return;
  }
  for (std::size_t begin = 0; begin < keys.size(); begin += kToldApart) {
    const std::size_t count = std::min<std::size_t>(kToldApart, keys.size() - begin);
    find_in_both(keys.subspan(begin, count), rows + begin, outcomes + begin);
  }
}

// First the pages of all keys, then their slots, which are on their way by then; keys without a
// page are gathered, found in the hash, and their results spread again.
void KeyMap::find_in_both(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const {
  const std::uint32_t* slots[kToldApart];
  std::uint16_t hashed[kToldApart];
  std::size_t num_hashed = 0;
  std::uint64_t last_id = DensePages::id_of(keys[0]);
  const DensePages::Page* page = dense_.find(last_id);
  const std::uint32_t none = DensePages::kNoRow;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t id = DensePages::id_of(keys[i]);
    if (id != last_id) {
      page = dense_.find(id);
      last_id = id;
    }
    slots[i] = page == nullptr ? &none : page->rows + DensePages::slot_of(keys[i]);
    prefetch_line(slots[i]);
    hashed[num_hashed] = static_cast<std::uint16_t>(i);
    num_hashed += static_cast<std::size_t>(page == nullptr);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t row = *slots[i];
    const auto missing = static_cast<std::uint32_t>(row == DensePages::kNoRow);
    rows[i] = row & (missing - 1);
    outcomes[i] = static_cast<Outcome>(missing * static_cast<std::uint32_t>(Outcome::kMissing));
  }
  if (num_hashed == 0) return;
  Key others[kToldApart];
  RowNumber their_rows[kToldApart];
  Outcome their_outcomes[kToldApart];
  for (std::size_t j = 0; j < num_hashed; ++j) others[j] = keys[hashed[j]];
  hashed_.find({others, num_hashed}, their_rows, their_outcomes);
  for (std::size_t j = 0; j < num_hashed; ++j) {
    rows[hashed[j]] = their_rows[j];
    outcomes[hashed[j]] = their_outcomes[j];
  }
}

std::optional<std::uint32_t> KeyMap::find_one(Key key) const {
  if (const DensePages::Page* page = dense_.find(DensePages::id_of(key))) {
    const std::uint32_t row = page->rows[DensePages::slot_of(key)];
    return row == DensePages::kNoRow ? std::nullopt : std::optional(row);
  }
  return hashed_.find_one(key);
}

void KeyMap::prefetch(Key key) const {
  if (const DensePages::Page* page = dense_.find(DensePages::id_of(key))) {
    prefetch_line(page->rows + DensePages::slot_of(key));
    return;
  }
  hashed_.prefetch(key);
}

std::uint32_t KeyMap::find_or_insert(Key key, std::uint32_t row) {
  if (!dense_.empty()) {
    const std::uint64_t id = DensePages::id_of(key);
    const DensePages::Page* page = dense_.find(id);
    if (page == nullptr && is_at_border_of_dense(key) && adopt(id, 0)) page = dense_.find(id);
    if (page != nullptr) {
      const std::uint32_t found = page->rows[DensePages::slot_of(key)];
      if (found != DensePages::kNoRow) return found;
      dense_.insert(key, row);
      return row;
    }
  }
  return hashed_.find_or_insert(key, row);
}

std::optional<std::uint32_t> KeyMap::erase(Key key) noexcept {
  if (dense_.find(DensePages::id_of(key)) != nullptr) return dense_.erase(key);
  return hashed_.erase(key);
}

void KeyMap::clear() noexcept {
  hashed_.clear();
  dense_.clear();
  num_candidates_ = 0;
}

void KeyMap::swap(KeyMap& other) noexcept {
  hashed_.swap(other.hashed_);
  dense_.swap(other.dense_);
  candidates_.swap(other.candidates_);
  std::swap(num_candidates_, other.num_candidates_);
  std::swap(cursor_, other.cursor_);
  std::swap(inspection_budget_, other.inspection_budget_);
  std::swap(adoption_budget_, other.adoption_budget_);
}

void KeyMap::reserve(std::int64_t num_keys) {
  hashed_.reserve(num_keys - dense_.size());
  grow_for(num_keys - dense_.size());
}

void KeyMap::grow_for(std::int64_t num_keys) {
  if (dense_.size() <= hashed_.size()) hashed_.grow_for(num_keys);
}

KeyMapStats KeyMap::stats() const {
  KeyMapStats stats;
  stats.hashed = hashed_.stats();
  stats.bytes = stats.hashed.bytes + dense_.bytes();
  stats.dense_keys = dense_.size();
  stats.dense_pages = dense_.num_pages();
  return stats;
}

void KeyMap::check_invariants() const {
  hashed_.check_invariants();
  dense_.check_invariants();
  hashed_.for_each([&](Key key, std::uint32_t) {
    if (dense_.find(DensePages::id_of(key)) != nullptr) {
      throw Error(ErrorCode::kInternal, "index invariant broken: key " + std::to_string(key) +
                                            " lies beside the dense page of its range");
    }
  });
}

// Ids that are counted upwards or downwards reach a range that has no page yet at its border, next
// to one that is well filled.
bool KeyMap::is_at_border_of_dense(Key key) const {
  constexpr std::uint32_t kBorder = DensePages::kPageKeys / 8;
  const std::uint64_t id = DensePages::id_of(key);
  const std::uint32_t slot = DensePages::slot_of(key);
  if (slot < kBorder) return dense_.count(DensePages::before(id)) >= kWorthAPage;
  return slot >= DensePages::kPageKeys - kBorder &&
         dense_.count(DensePages::after(id)) >= kWorthAPage;
}

void KeyMap::adapt(std::int64_t num_inserted) noexcept {
  constexpr std::int64_t kMostSaved = 16 * kInsertionsAnAdoption;  // so that no call takes long
  inspection_budget_ += num_inserted;
  adoption_budget_ = std::min(adoption_budget_, kMostSaved) + num_inserted;
  for (; inspection_budget_ >= kInsertionsAnInspection;
       inspection_budget_ -= kInsertionsAnInspection)
    inspect_segment();
  while (num_candidates_ > 0 && adoption_budget_ >= kInsertionsAnAdoption) {
    const std::uint64_t id = candidates_[--num_candidates_];
    if (dense_.find(id) != nullptr) continue;
    adoption_budget_ -= kInsertionsAnAdoption;
    if (!adopt(id, kWorthAPage)) continue;
    add_candidate(DensePages::after(id));
    add_candidate(DensePages::before(id));
  }
}

void KeyMap::add_candidate(std::uint64_t id) {
  if (num_candidates_ < candidates_.size()) candidates_[num_candidates_++] = id;
}

// Takes a few keys and counts their neighbours. Most tables have none: three probes show that.
void KeyMap::inspect_segment() {
  constexpr std::int64_t kSamples = 4;
  constexpr std::int64_t kNeighbours = 64;
  Key samples[kSamples];
  const std::int64_t count = hashed_.sample(cursor_, samples, kSamples);
  for (const Key key : std::span(samples).first(static_cast<std::size_t>(count))) {
    const int num_close = static_cast<int>(hashed_.find_one(key ^ 1).has_value()) +
                          static_cast<int>(hashed_.find_one(key ^ 2).has_value()) +
                          static_cast<int>(hashed_.find_one(key ^ 4).has_value());
    if (num_close < 2) continue;
    Key keys[kNeighbours];
    RowNumber rows[kNeighbours];
    Outcome outcomes[kNeighbours];
    for (std::int64_t i = 0; i < kNeighbours; ++i) keys[i] = (key & -kNeighbours) + i;
    hashed_.find(keys, rows, outcomes);
    if (std::count(outcomes, outcomes + kNeighbours, Outcome::kFound) >= kNeighbours / 2)
      add_candidate(DensePages::id_of(key));
  }
}

// Gives a range that holds `at_least` keys a page, and moves them there. False if it does not hold
// as many, or there is no memory for the page.
bool KeyMap::adopt(std::uint64_t id, std::int64_t at_least) {
  constexpr std::uint32_t kKeys = DensePages::kPageKeys;
  Key keys[kKeys];
  RowNumber rows[kKeys];
  Outcome outcomes[kKeys];
  for (std::uint32_t slot = 0; slot < kKeys; ++slot) keys[slot] = DensePages::key_of(id, slot);
  hashed_.find(keys, rows, outcomes);
  if (std::count(outcomes, outcomes + kKeys, Outcome::kFound) < at_least) return false;
  try {
    dense_.add(id);
  } catch (...) {
    return false;
  }
  for (std::uint32_t slot = 0; slot < kKeys; ++slot) {
    if (outcomes[slot] != Outcome::kFound) continue;
    hashed_.erase(keys[slot]);
    dense_.insert(keys[slot], static_cast<std::uint32_t>(rows[slot]));
  }
  if (hashed_.size() == 0) hashed_.clear();
  return true;
}

}  // namespace recsdk::internal
