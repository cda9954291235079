// What an evictor tells about itself: memory, and what is broken.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "eviction/evictor.h"

namespace recsdk::internal {

std::int64_t Evictor::bytes() const noexcept {
  std::size_t bytes =
      groups_.capacity() * sizeof(Group) +
      (scratch_.capacity() + chosen_.capacity() + passed_over_.capacity()) * sizeof(Filed) +
      low_.capacity() * sizeof(std::uint32_t);
  for (const Group& group : groups_) {
    bytes += (group.run.capacity() + group.heap.capacity()) * sizeof(Filed) +
             group.young.capacity() * sizeof(Young) +
             group.members.capacity() * sizeof(std::uint32_t);
  }
  return static_cast<std::int64_t>(bytes) + marked_.bytes() + fresh_.bytes() +
         (kinds_ ? kinds_->bytes() : 0);
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
        if (is_used(entry.row) && Capacity::hash_of(numbers.key(entry.row)) == entry.place.hash &&
            !(filed(entry.row, numbers) < entry))
          is_filed[entry.row] = true;
      }
    }
    for (const std::uint32_t row : group.members) {
      if (is_used(row) && capacity.group_of(numbers.key(row)) == g &&
          !(place(row, numbers) < group.border))
        is_filed[row] = true;
    }
    if (!std::is_sorted(group.young.begin(), group.young.end(),
                        [](const Young& a, const Young& b) { return a.born < b.born; }))
      return "the young are not sorted";
    for (std::size_t i = group.num_grown; i < group.young.size(); ++i) {
      const Young& young = group.young[i];
      if (is_used(young.row) && capacity.group_of(numbers.key(young.row)) == g &&
          meta_.born(numbers.meta(young.row)) == young.born)
        is_filed[young.row] = true;
    }
  }
  for (std::uint32_t row = 0; row < numbers.end(); ++row) {
    if (is_used(row) && !is_filed[row])
      return "row " + std::to_string(row) + " would not be found when it is the lowest";
  }
  return {};
}

}  // namespace recsdk::internal
