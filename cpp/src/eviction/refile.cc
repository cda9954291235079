// Files rows anew whose order a look has changed.
//
// Between two looks the orders of measured rows stay as they are, so each row is filed under the
// order that it has. A row whose order changed is taken out and filed again, group by group.
// Groups without such rows are not read, nor are candidates where only members changed. Rows are
// read in ascending order, unlike in a pass over the members of a group.
#include <algorithm>
#include <functional>
#include <new>
#include <utility>

#include "util/prefetch.h"

#include "eviction/evictor.h"

namespace recsdk::internal {
namespace {

constexpr std::size_t kMostRun = 3;  // times as many candidates as members, or all are members

}  // namespace

// A group has its part of all keys, so one border does for all.
float Evictor::likely_border(std::span<float> found, std::size_t stride) const noexcept {
  constexpr std::size_t kLeast = 64;  // a part of those found
  if (found.empty()) return 0.0F;
  // Groups have as many rows each, so of one far more are old than of another: with half as many
  // more as have left, in place of twice as many, one group in twenty runs out.
  const std::size_t wanted =
      std::clamp(2 * num_chosen_ / stride, found.size() / kLeast, found.size() / 2);
  const auto border = found.begin() + static_cast<std::ptrdiff_t>(wanted);
  std::nth_element(found.begin(), border, found.end());
  return *border;
}

void Evictor::add_shift(const Filed& entry, std::size_t number, bool was_candidate,
                        Shifts& shifts) {
  shifts.groups.push_back(static_cast<std::uint32_t>(number));
  shifts.entries.push_back(entry);
  marked_.assign_alone(entry.row, true);
  Shift& shift = shifts.of_groups[number];
  ++shift.count;
  ++(was_candidate ? shift.num_candidates : shift.num_members);
}

// Those that stay among the members of their group do not shift.
void Evictor::find_shifts(std::span<const Measured> measured, const RowNumbers& numbers,
                          const Capacity& capacity, Shifts& shifts) {
  for (std::size_t i = 0; i < measured.size(); ++i) {
    if (i + kItemsAhead < measured.size()) numbers.prefetch(measured[i + kItemsAhead].row);
    const auto [row, before] = measured[i];
    const Filed entry = filed(row, numbers);
    const std::size_t number = capacity.group_of_hash(entry.place.hash);
    const Group& group = groups_[number];
    const bool is_candidate = entry.place < group.border;
    const bool was_candidate =
        Place{RowMeta::measured_order(before), entry.place.hash} < group.border;
    if ((is_candidate || was_candidate) && !is_waiting(group, row, numbers))
      add_shift(entry, number, was_candidate, shifts);
  }
}

void Evictor::sort_by_group(Shifts& shifts) {
  std::vector<std::size_t> next;
  next.reserve(shifts.of_groups.size());
  std::size_t begin = 0;
  for (const Shift& shift : shifts.of_groups) {
    next.push_back(begin);
    begin += shift.count;
  }
  std::vector<Filed> sorted(shifts.entries.size());
  for (std::size_t i = 0; i < sorted.size(); ++i)
    sorted[next[shifts.groups[i]]++] = shifts.entries[i];
  shifts.entries = std::move(sorted);
}

// Takes marked rows out of where they are filed. Those that came last are the last members, so few
// others are looked at; a row that may be filed twice is looked for among all.
void Evictor::take_out(Group& group, const Shift& shift) {
  std::vector<std::uint32_t>& members = group.members;
  if (group.num_stale > 0) {
    std::erase_if(members, [this](std::uint32_t row) { return marked_.test(row); });
  } else {
    std::uint32_t left = shift.num_members;
    for (std::size_t i = members.size(); left > 0 && i-- > 0;) {
      if (!marked_.test(members[i])) continue;
      members[i] = members.back();
      members.pop_back();
      --left;
    }
  }
  if (shift.num_candidates == 0 && group.num_stale == 0) return;
  const auto is_out = [this](const Filed& entry) { return marked_.test(entry.row); };
  std::erase_if(group.run, is_out);
  std::erase_if(group.heap, is_out);
  std::make_heap(group.heap.begin(), group.heap.end(), std::greater<>());
}

// The lowest are merged into the end of the run, which is all that is near to leaving.
void Evictor::file_all(Group& group, std::span<Filed> entries) {
  constexpr std::size_t kRunOfEach = 4;
  const auto members = std::partition(entries.begin(), entries.end(),
                                      [&](const Filed& each) { return each.place < group.border; });
  for (auto entry = members; entry != entries.end(); ++entry) group.members.push_back(entry->row);
  std::sort(entries.begin(), members, std::greater<>());
  std::vector<Filed>& run = group.run;
  const auto num_low = static_cast<std::size_t>(members - entries.begin());
  const std::size_t tail = std::min(run.size(), kRunOfEach * num_low);
  auto first = entries.begin();
  for (; first != members && tail < run.size() && run[run.size() - tail - 1] < *first; ++first)
    file(group, *first);
  const auto middle = static_cast<std::ptrdiff_t>(run.size());
  run.insert(run.end(), first, members);
  std::inplace_merge(run.begin() + middle - static_cast<std::ptrdiff_t>(tail), run.begin() + middle,
                     run.end(), std::greater<>());
  if (run.size() + group.heap.size() > kMostRun * group.members.size()) unsort(group);
}

void Evictor::refile(std::span<const Measured> measured, const RowNumbers& numbers,
                     const Capacity& capacity) noexcept {
  if (is_lost_ || measured.empty()) return;
  Shifts shifts;
  try {
    shifts.of_groups.resize(groups_.size());
    marked_.grow(numbers.num_prepared());
    find_shifts(measured, numbers, capacity, shifts);
    sort_by_group(shifts);
    std::span<Filed> left = shifts.entries;
    for (std::size_t number = 0; number < groups_.size(); ++number) {
      const Shift& shift = shifts.of_groups[number];
      if (shift.count == 0) continue;
      take_out(groups_[number], shift);
      file_all(groups_[number], left.first(shift.count));
      left = left.subspan(shift.count);
    }
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
  for (const Filed& entry : shifts.entries) marked_.assign_alone(entry.row, false);
}

RowBits& Evictor::low_rows(const RowNumbers& numbers) {
  marked_.grow(numbers.num_prepared());
  return marked_;
}

// Takes the marked of the members into low_. A jump at each of them would be guessed wrong.
void Evictor::part_members(std::vector<std::uint32_t>& members) {
  low_.resize(members.size());
  std::size_t num_low = 0;
  std::size_t num_kept = 0;
  const RowAddresses words = marked_.words();
  for (const std::uint32_t row : members) {
    const std::uint64_t word =
        *reinterpret_cast<const std::uint64_t*>(words.record(row / kWordRows));
    const std::size_t is_low = (word >> (row % kWordRows)) & 1;
    low_[num_low] = row;
    num_low += is_low;
    members[num_kept] = row;
    num_kept += 1 - is_low;
  }
  low_.resize(num_low);
  members.resize(num_kept);
}

// Group by group, so that all that is written is near.
void Evictor::refile_group(std::uint32_t number, const RowNumbers& numbers,
                           const Capacity& capacity) {
  Group& group = groups_[number];
  part_members(group.members);
  std::vector<Filed>& run = group.run;
  run.reserve(low_.size());
  for (std::size_t i = 0; i < low_.size(); ++i) {
    if (i + kItemsAhead < low_.size()) prefetch_filed(low_[i + kItemsAhead], numbers);
    const Filed entry = filed(low_[i], numbers);
    if (capacity.group_of_hash(entry.place.hash) == number) run.push_back(entry);  // else stale
  }
  std::sort(run.begin(), run.end(), std::greater<>());
  if (group.num_stale > 0)
    run.erase(std::unique(run.begin(), run.end(),
                          [](const Filed& a, const Filed& b) { return a.row == b.row; }),
              run.end());
  if (run.size() > kMostRun * group.members.size()) unsort(group);
}

void Evictor::refile_all(float border, const RowNumbers& numbers,
                         const Capacity& capacity) noexcept {
  try {
    for (std::uint32_t number = 0; !is_lost_ && number < groups_.size(); ++number) {
      unsort(groups_[number]);
      groups_[number].border = {RowMeta::measured_order(border), 0};
      refile_group(number, numbers, capacity);
    }
  } catch (const std::bad_alloc&) {
    is_lost_ = true;
  }
  for (std::int64_t i = 0; i < marked_.num_words(); ++i) marked_.word(i) = 0;
  num_chosen_ = 0;
}

}  // namespace recsdk::internal
