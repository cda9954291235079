#include "index/evictor.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <new>
#include <utility>

#include "util/hash.h"

namespace recsdk::internal {
namespace {

constexpr std::size_t kAhead = 16;
constexpr std::size_t kFewMembers = 32;  // which a pass takes all

std::uint64_t hash_of(Key key) noexcept {
  return virtual_shard_hash(static_cast<std::uint64_t>(key));
}

}  // namespace

Evictor::Evictor(const EvictConfig& config, std::int64_t num_groups)
    : meta_(config), groups_(static_cast<std::size_t>(num_groups)) {}

void Evictor::begin_call(const RowNumbers& numbers, std::span<const std::uint32_t> fresh,
                         std::size_t num_marks) {
  marked_.grow(numbers.num_prepared());
  fresh_.grow(numbers.num_prepared());
  marked_rows_.reserve(num_marks);
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
  return {meta_.order(numbers.meta(row)), hash_of(numbers.key(row))};
}

Evictor::Filed Evictor::filed(std::uint32_t row, const RowNumbers& numbers) const noexcept {
  return {place(row, numbers), row};
}

// The hash is a bijection, so equal hashes mean equal keys.
bool Evictor::is_there(const Filed& entry, const RowNumbers& numbers) const noexcept {
  return numbers.state(entry.row) != RowState::kFree && !numbers.is_leaving(entry.row) &&
         !fresh_.test(entry.row) && hash_of(numbers.key(entry.row)) == entry.place.hash;
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
bool Evictor::take_lowest(Group& group, const RowNumbers& numbers) {
  if (group.run.empty() && group.heap.empty()) return false;
  if (group.heap.empty() || (!group.run.empty() && group.run.back() < group.heap.front())) {
    scratch_.push_back(group.run.back());
    group.run.pop_back();
  } else {
    scratch_.push_back(group.heap.front());
    std::pop_heap(group.heap.begin(), group.heap.end(), std::greater<>());
    group.heap.pop_back();
  }
  numbers.prefetch(scratch_.back().row);
  return true;
}

// Makes candidates of the lower half of the members; there are no others.
void Evictor::pass(Group& group, std::uint32_t number, const RowNumbers& numbers,
                   const Capacity& capacity) {
  std::vector<std::uint32_t>& rows = group.members;
  if (std::exchange(group.num_stale, 0U) > 0) {  // of a row that is filed twice, one is enough
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  }
  scratch_.clear();
  scratch_.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) numbers.prefetch(rows[i + kAhead]);
    const std::uint32_t row = rows[i];
    if (numbers.state(row) == RowState::kFree || numbers.is_leaving(row)) continue;
    if (fresh_.test(row)) continue;
    if (capacity.group_of(numbers.key(row)) == number) scratch_.push_back(filed(row, numbers));
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
// on their way before the first is looked at. Orders only rise: whoever is lower than one of them
// now was filed lower, and is among them. So all that have not risen leave.
std::uint32_t Evictor::choose(Capacity::Excess excess, std::int64_t step, const RowNumbers& numbers,
                              const Capacity& capacity, std::vector<std::uint32_t>& victims) {
  Group& group = groups_[excess.group];
  const std::size_t old_size = victims.size();
  std::size_t wanted = excess.count;
  if (victims.capacity() < old_size + wanted)
    victims.reserve(std::max(old_size + wanted, 2 * victims.capacity()));
  passed_over_.clear();
  try {
    while (wanted > 0) {
      scratch_.clear();
      scratch_.reserve(wanted);
      while (scratch_.size() < wanted && take_lowest(group, numbers)) {
      }
      if (scratch_.empty()) {
        if (group.members.empty()) break;
        pass(group, excess.group, numbers, capacity);
        continue;
      }
      for (const Filed& lowest : scratch_) {
        if (!is_there(lowest, numbers)) continue;
        const std::int64_t* const words = numbers.meta(lowest.row);
        const std::uint64_t order = meta_.order(words);
        if (order != lowest.place.order) {
          file(group, {{order, lowest.place.hash}, lowest.row});
        } else if (marked_.test(lowest.row) || !meta_.may_leave(words, step)) {
          passed_over_.push_back(lowest);
        } else {
          victims.push_back(lowest.row);
          mark(lowest.row);
          --wanted;
        }
      }
    }
    for (const Filed& entry : passed_over_) file(group, entry);
  } catch (...) {
    is_lost_ = true;
    throw;
  }
  const auto is_lower = [&](std::uint32_t a, std::uint32_t b) {
    return place(a, numbers) < place(b, numbers);
  };
  const auto first = victims.begin() + static_cast<std::ptrdiff_t>(old_size);
  if (!std::is_sorted(first, victims.end(), is_lower)) std::sort(first, victims.end(), is_lower);
  return excess.count - static_cast<std::uint32_t>(wanted);
}

void Evictor::add(std::span<const std::uint32_t> rows, const RowNumbers& numbers,
                  const Capacity& capacity) noexcept {
  if (is_lost_) return;
  try {
    for (const std::uint32_t row : rows)
      file(groups_[capacity.group_of(numbers.key(row))], filed(row, numbers));
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
}

void Evictor::note_fallen(std::uint32_t row, const RowNumbers& numbers,
                          const Capacity& capacity) noexcept {
  const std::uint32_t number = capacity.group_of(numbers.key(row));
  const Filed entry = filed(row, numbers);
  if (is_lost_ || !(entry.place < groups_[number].border)) return;
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
  if (++group.num_stale <= kManyStale + 2 * capacity.used(number)) return;
  std::vector<std::uint32_t>& rows = group.members;
  for (const auto* entries : {&group.run, &group.heap}) {
    for (const Filed& entry : *entries) rows.push_back(entry.row);
  }
  std::erase_if(rows, [&](std::uint32_t row) {
    return numbers.state(row) == RowState::kFree || numbers.is_leaving(row) ||
           capacity.group_of(numbers.key(row)) != number;
  });
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  group.run.clear();
  group.heap.clear();
  group.border = Place();
  group.num_stale = 0;
}

void Evictor::forget() noexcept { is_lost_ = true; }

// Files all rows anew.
void Evictor::scan(const RowNumbers& numbers, const Capacity& capacity) {
  for (Group& group : groups_) group = Group();
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) == RowState::kFree || numbers.is_leaving(row)) continue;
    groups_[capacity.group_of(numbers.key(row))].members.push_back(static_cast<std::uint32_t>(row));
  }
  is_lost_ = false;
}

std::int64_t Evictor::bytes() const noexcept {
  std::size_t bytes = groups_.capacity() * sizeof(Group) + scratch_.capacity() * sizeof(Filed);
  for (const Group& group : groups_) {
    bytes += (group.run.capacity() + group.heap.capacity()) * sizeof(Filed) +
             group.members.capacity() * sizeof(std::uint32_t);
  }
  return static_cast<std::int64_t>(bytes) + marked_.bytes() + fresh_.bytes();
}

std::string Evictor::find_broken(const RowNumbers& numbers, const Capacity& capacity) const {
  if (!marked_rows_.empty() || !fresh_rows_.empty()) return "rows are marked between calls";
  if (is_lost_) return {};
  std::vector<bool> is_filed(static_cast<std::size_t>(numbers.end()));
  const auto is_used = [&](std::uint32_t row) {
    return row < numbers.end() && numbers.state(row) != RowState::kFree && !numbers.is_leaving(row);
  };
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    if (!std::is_sorted(group.run.rbegin(), group.run.rend())) return "a run is not sorted";
    if (!std::is_heap(group.heap.begin(), group.heap.end(), std::greater<>()))
      return "a heap is none";
    for (const auto* entries : {&group.run, &group.heap}) {
      for (const Filed& entry : *entries) {
        if (is_used(entry.row) && hash_of(numbers.key(entry.row)) == entry.place.hash &&
            !(filed(entry.row, numbers) < entry))
          is_filed[entry.row] = true;
      }
    }
    for (const std::uint32_t row : group.members) {
      if (is_used(row) && capacity.group_of(numbers.key(row)) == g &&
          !(place(row, numbers) < group.border))
        is_filed[row] = true;
    }
  }
  for (std::uint32_t row = 0; row < numbers.end(); ++row) {
    if (is_used(row) && !is_filed[row])
      return "row " + std::to_string(row) + " would not be found when it is the lowest";
  }
  return {};
}

}  // namespace recsdk::internal
