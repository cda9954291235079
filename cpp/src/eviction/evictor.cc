#include "eviction/evictor.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <new>

#include "util/prefetch.h"

namespace recsdk::internal {
namespace {

constexpr std::size_t kFewMembers = 32;  // which a pass takes all

}  // namespace

Evictor::Evictor(const EvictConfig& config, std::int64_t num_groups)
    : meta_(config), groups_(static_cast<std::size_t>(num_groups)) {
  if (config.order == EvictOrder::kFunction && !config.ignores_now) kinds_.emplace(meta_);
}

void Evictor::begin_call(const RowNumbers& numbers, std::span<const std::uint32_t> fresh,
                         std::size_t num_marks, bool is_new_step) {
  is_new_step_ = is_new_step;
  marked_.grow(numbers.num_prepared());
  fresh_.grow(numbers.num_prepared());
  marked_rows_.reserve(num_marks);
  if (!has_stale_) return;
  fresh_rows_.assign(fresh.begin(), fresh.end());
  for (const std::uint32_t row : fresh) fresh_.assign_alone(row, true);
}

void Evictor::mark(std::int64_t row) noexcept {
  if (marked_.test(row)) return;
  marked_.assign_alone(row, true);
  marked_rows_.push_back(static_cast<std::uint32_t>(row));
}

void Evictor::end_call() noexcept {
  for (const std::uint32_t row : marked_rows_) marked_.assign_alone(row, false);
  marked_rows_.clear();
  for (const std::uint32_t row : fresh_rows_) fresh_.assign_alone(row, false);
  fresh_rows_.clear();
}

Evictor::Place Evictor::place(std::uint32_t row, const RowNumbers& numbers) const noexcept {
  return {order(row, numbers), Capacity::hash_of(numbers.key(row))};
}

Evictor::Filed Evictor::filed(std::uint32_t row, const RowNumbers& numbers) const noexcept {
  return {place(row, numbers), row};
}

// The hash is a bijection, so equal hashes mean equal keys.
bool Evictor::is_there(const Filed& entry, const RowNumbers& numbers) const noexcept {
  return numbers.state(entry.row) != RowState::kFree && !numbers.is_leaving(entry.row) &&
         !fresh_.test(entry.row) && Capacity::hash_of(numbers.key(entry.row)) == entry.place.hash;
}

bool Evictor::is_of(std::uint32_t row, std::uint32_t number, const RowNumbers& numbers,
                    const Capacity& capacity) const noexcept {
  return numbers.state(row) != RowState::kFree && !numbers.is_leaving(row) &&
         capacity.group_of(numbers.key(row)) == number;
}

void Evictor::file(Group& group, const Filed& entry) {
  if (entry.place < group.border) {
    group.heap.push_back(entry);
    std::push_heap(group.heap.begin(), group.heap.end(), std::greater<>());
  } else {
    group.members.push_back(entry.row);
  }
}

// Moves the lowest candidate, under the order that it was filed with, to scratch_; false if there
// is none.
bool Evictor::take_lowest(Group& group) {
  if (group.run.empty() && group.heap.empty()) return false;
  if (group.heap.empty() || (!group.run.empty() && group.run.back() < group.heap.front())) {
    scratch_.push_back(group.run.back());
    group.run.pop_back();
  } else {
    scratch_.push_back(group.heap.front());
    std::pop_heap(group.heap.begin(), group.heap.end(), std::greater<>());
    group.heap.pop_back();
  }
  return true;
}

// Files the young that are old enough by now, or all.
void Evictor::file_grown(Group& group, std::uint32_t number, std::optional<std::int64_t> step,
                         const RowNumbers& numbers, const Capacity& capacity) {
  std::vector<Young>& young = group.young;
  std::size_t& n = group.num_grown;
  for (; n < young.size() && (!step || meta_.is_grown(young[n].born, *step)); ++n) {
    if (n + kItemsAhead < young.size()) numbers.prefetch(young[n + kItemsAhead].row);
    const std::uint32_t row = young[n].row;
    if (group.num_stale == 0 || (!fresh_.test(row) && is_of(row, number, numbers, capacity)))
      file(group, filed(row, numbers));
  }
  if (n < young.size() / 2) return;
  young.erase(young.begin(), young.begin() + static_cast<std::ptrdiff_t>(n));
  n = 0;
}

// Makes candidates of the lower half of the members; there are no others.
void Evictor::pass(Group& group, std::uint32_t number, const RowNumbers& numbers,
                   const Capacity& capacity) {
  std::vector<std::uint32_t>& rows = group.members;
  const bool has_stale = group.num_stale > 0;
  if (has_stale) {  // of a row that is filed twice, one is enough
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    // A row that this call has chosen is still in use, and one that it passed over is filed again.
    if (group.young.empty() && chosen_.empty() && passed_over_.empty()) group.num_stale = 0;
  }
  scratch_.clear();
  scratch_.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) prefetch_filed(rows[i + kItemsAhead], numbers);
    if (!has_stale || (!fresh_.test(rows[i]) && is_of(rows[i], number, numbers, capacity)))
      scratch_.push_back(filed(rows[i], numbers));
  }
  const std::size_t lower = scratch_.size() <= kFewMembers ? scratch_.size() : scratch_.size() / 2;
  const auto middle = scratch_.begin() + static_cast<std::ptrdiff_t>(lower);
  group.run.reserve(lower);
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  Place border{kMost, kMost};
  if (middle != scratch_.end()) {
    std::nth_element(scratch_.begin(), middle, scratch_.end());
    border = middle->place;
  }
  std::sort(scratch_.begin(), middle, std::greater<>());
  group.run.assign(scratch_.begin(), middle);
  group.border = border;
  rows.clear();
  for (auto entry = middle; entry != scratch_.end(); ++entry) rows.push_back(entry->row);
}

// As many of the lowest candidates as are wanted are taken at a time, so that all their records are
// on their way before the first is looked at. Orders only rise: a row that is lower than one of
// them now was filed lower, and is among them. So all that have not risen leave. Between looks
// measured rows do not rise, and in a new step only keys that the call has marked were seen: then
// no record is read.
void Evictor::take_victims(Group& group, std::uint32_t number, std::size_t wanted,
                           std::optional<std::int64_t> step, const RowNumbers& numbers,
                           const Capacity& capacity) {
  while (wanted > 0) {
    const bool stands =
        meta_.is_measured() && !meta_.has_young() && is_new_step_ && group.num_stale == 0;
    scratch_.clear();
    scratch_.reserve(wanted);
    while (scratch_.size() < wanted && take_lowest(group)) {
      marked_.prefetch(scratch_.back().row);
      if (!stands) numbers.prefetch_meta(scratch_.back().row);
    }
    if (scratch_.empty()) {
      if (group.members.empty()) break;
      pass(group, number, numbers, capacity);
      continue;
    }
    for (const Filed& lowest : scratch_) {
      if (group.num_stale > 0 && !is_there(lowest, numbers)) continue;
      const std::int64_t* const words = numbers.meta(lowest.row);
      const std::uint64_t now = stands ? lowest.place.order : order(lowest.row, numbers);
      if (now != lowest.place.order) {
        file(group, {{now, lowest.place.hash}, lowest.row});
      } else if (marked_.test(lowest.row) || (!stands && step && !meta_.may_leave(words, *step))) {
        passed_over_.push_back(lowest);
      } else {
        chosen_.push_back(lowest);
        mark(lowest.row);
        --wanted;
      }
    }
  }
  for (const Filed& entry : passed_over_) file(group, entry);
}

void Evictor::prefetch(std::uint32_t number) const noexcept {
  const Group& group = groups_[number];
  if (!group.run.empty()) prefetch_line(&group.run.back());
  if (!group.heap.empty()) prefetch_line(&group.heap.front());
}

std::uint32_t Evictor::choose(Capacity::Excess excess, std::optional<std::int64_t> step,
                              const RowNumbers& numbers, const Capacity& capacity,
                              std::vector<Victim>& victims) {
  Group& group = groups_[excess.group];
  if (step && group.spent_in == step) return 0;
  const std::size_t needed = victims.size() + excess.count;
  if (victims.capacity() < needed) victims.reserve(std::max(needed, 2 * victims.capacity()));
  chosen_.clear();
  passed_over_.clear();
  try {
    chosen_.reserve(excess.count);
    file_grown(group, excess.group, step, numbers, capacity);
    take_victims(group, excess.group, excess.count, step, numbers, capacity);
  } catch (...) {
    is_lost_ = true;
    throw;
  }
  if (!std::is_sorted(chosen_.begin(), chosen_.end())) std::sort(chosen_.begin(), chosen_.end());
  for (const Filed& entry : chosen_)
    victims.push_back({Capacity::key_of(entry.place.hash), entry.row});
  num_chosen_ += chosen_.size();
  if (chosen_.size() < excess.count) group.spent_in = step;
  return static_cast<std::uint32_t>(chosen_.size());
}

void Evictor::undo_call(std::span<const Victim> victims, const RowNumbers& numbers,
                        const Capacity& capacity) noexcept {
  end_call();
  for (Group& group : groups_) group.spent_in.reset();
  if (is_lost_) return;
  try {
    for (const Victim& victim : victims)
      file(groups_[capacity.group_of(victim.key)], filed(victim.row, numbers));
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

void Evictor::add(std::span<const std::uint32_t> rows, std::span<const std::uint64_t> hashes,
                  const RowNumbers& numbers, const Capacity& capacity) noexcept {
  if (is_lost_) return;
  try {
    for (std::size_t j = 0; j < rows.size(); ++j) {
      if (j + kItemsAhead < rows.size()) {
        numbers.prefetch_meta(rows[j + kItemsAhead]);
        prefetch_line(&groups_[capacity.group_of_hash(hashes[j + kItemsAhead])].members);
      }
      Group& group = groups_[capacity.group_of_hash(hashes[j])];
      const std::int64_t* const words = numbers.meta(rows[j]);
      if (meta_.has_young()) {
        group.young.push_back({meta_.born(words), rows[j]});
      } else {
        file(group, {{order(rows[j], numbers), hashes[j]}, rows[j]});
      }
    }
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

// Whether the row is too young to be filed.
bool Evictor::is_waiting(const Group& group, std::uint32_t row,
                         const RowNumbers& numbers) const noexcept {
  return meta_.has_young() && group.num_grown < group.young.size() &&
         meta_.born(numbers.meta(row)) >= group.young[group.num_grown].born;
}

void Evictor::note_fallen(std::uint32_t row, const RowNumbers& numbers,
                          const Capacity& capacity) noexcept {
  const std::uint32_t number = capacity.group_of(numbers.key(row));
  const Filed entry = filed(row, numbers);
  const Group& group = groups_[number];
  if (is_lost_ || !(entry.place < group.border) || is_waiting(group, row, numbers)) return;
  try {
    file(groups_[number], entry);
    add_stale(number, numbers, capacity);
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

void Evictor::note_erased(Key key, const RowNumbers& numbers, const Capacity& capacity) noexcept {
  if (is_lost_) return;
  try {
    add_stale(capacity.group_of(key), numbers, capacity);
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

// Rows that are filed in vain again and again must not fill memory: then all become members.
void Evictor::add_stale(std::uint32_t number, const RowNumbers& numbers, const Capacity& capacity) {
  constexpr std::int64_t kManyStale = 64;
  Group& group = groups_[number];
  has_stale_ = true;
  if (++group.num_stale <= kManyStale + 2 * capacity.used(number)) return;
  unsort(group);
  std::vector<std::uint32_t>& rows = group.members;
  const auto is_other = [&](std::uint32_t row) { return !is_of(row, number, numbers, capacity); };
  std::erase_if(rows, is_other);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::vector<Young>& young = group.young;
  young.erase(young.begin(), young.begin() + static_cast<std::ptrdiff_t>(group.num_grown));
  std::erase_if(young, [&](const Young& entry) {
    return is_other(entry.row) || meta_.born(numbers.meta(entry.row)) != entry.born;
  });
  std::sort(young.begin(), young.end());
  young.erase(std::unique(young.begin(), young.end()), young.end());
  group.num_grown = 0;
  group.num_stale = 1;  // a row of this call may be filed for the key that had it before
}

// Makes members of all candidates.
void Evictor::unsort(Group& group) {
  group.members.reserve(group.members.size() + group.run.size() + group.heap.size());
  for (std::vector<Filed>* const entries : {&group.run, &group.heap}) {
    for (const Filed& entry : *entries) group.members.push_back(entry.row);
    entries->clear();
  }
  group.border = Place();
}

void Evictor::unsort() noexcept {
  if (is_lost_) return;
  try {
    for (Group& group : groups_) unsort(group);
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

void Evictor::forget() noexcept { is_lost_ = true; }

// Files all rows anew.
void Evictor::scan(const RowNumbers& numbers, const Capacity& capacity) {
  for (Group& group : groups_) group = Group();
  for (RowNumber n = 0; n < numbers.end(); ++n) {
    if (numbers.state(n) == RowState::kFree || numbers.is_leaving(n)) continue;
    Group& group = groups_[capacity.group_of(numbers.key(n))];
    const auto row = static_cast<std::uint32_t>(n);
    if (meta_.has_young()) {
      group.young.push_back({meta_.born(numbers.meta(row)), row});
    } else {
      group.members.push_back(row);
    }
  }
  for (Group& group : groups_) std::sort(group.young.begin(), group.young.end());
  is_lost_ = false;
  has_stale_ = false;
}

}  // namespace recsdk::internal
