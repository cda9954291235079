#include "eviction/capacity.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace recsdk {

std::int64_t default_eviction_groups(std::int64_t max_rows) {
  constexpr std::int64_t kRows = 4096;
  constexpr std::int64_t kFewest = 64;
  constexpr std::int64_t kFewestRows = 16;
  const auto wanted = static_cast<std::uint64_t>(std::max<std::int64_t>(max_rows / kRows, 1));
  const auto groups =
      std::min(static_cast<std::int64_t>(std::bit_floor(wanted)), kNumVirtualShards);
  return max_rows / kFewest >= kFewestRows ? std::max(groups, kFewest) : groups;
}

std::int64_t eviction_group(Key key, std::int64_t num_groups) {
  const std::uint64_t shard =
      internal::virtual_shard_hash(static_cast<std::uint64_t>(key)) & 0xFFFFU;
  return static_cast<std::int64_t>((shard * static_cast<std::uint64_t>(num_groups)) >> 16);
}

std::int64_t eviction_group_quota(std::int64_t max_rows, std::int64_t num_groups,
                                  std::int64_t group) {
  // The remainder is dealt evenly. Neither product overflows: it is below num_groups squared.
  const std::int64_t rest = max_rows % num_groups;
  return max_rows / num_groups + (group + 1) * rest / num_groups - group * rest / num_groups;
}

std::int64_t shared_row(Key key, std::int64_t num_rows) { return eviction_group(key, num_rows); }

Key shared_row_key(std::int64_t row, std::int64_t num_rows) {
  // The first virtual shard of its part.
  const std::int64_t first = (row * kNumVirtualShards + num_rows - 1) / num_rows;
  return static_cast<Key>(internal::virtual_shard_key(static_cast<std::uint64_t>(first)));
}

namespace internal {

Capacity::Capacity(std::int64_t max_rows, std::int64_t num_groups, std::optional<GroupRange> owned)
    : shift_(16 - std::countr_zero(static_cast<std::uint64_t>(num_groups))),
      quotas_(static_cast<std::size_t>(num_groups)),
      used_(quotas_.size()),
      counts_(quotas_.size()),
      owned_(owned.value_or(GroupRange{0, num_groups})),
      owns_all_(owned_.begin == 0 && owned_.end == num_groups) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();  // rows there can be
  for (std::int64_t group = owned_.begin; group < owned_.end; ++group) {
    const std::int64_t quota = eviction_group_quota(max_rows, num_groups, group);
    quotas_[static_cast<std::size_t>(group)] = static_cast<std::uint32_t>(std::min(quota, kMost));
    max_rows_ += quota;
  }
  find_least_room();
}

void Capacity::find_least_room() noexcept {
  least_room_ = std::numeric_limits<std::uint32_t>::max();
  for (auto group = static_cast<std::size_t>(owned_.begin);
       group < static_cast<std::size_t>(owned_.end); ++group)
    least_room_ = std::min<std::size_t>(least_room_, room(group));
  num_added_ = 0;
}

bool Capacity::has_room_for(std::size_t num_keys) noexcept {
  if (num_keys > least_room_ && num_added_ > quotas_.size()) find_least_room();
  return num_keys == 0 || (owns_all_ && num_keys <= least_room_);
}

bool Capacity::has_room_for(std::span<const Key> keys) noexcept {
  if (has_room_for(keys.size())) return true;
  if (least_room_ == 0) return false;
  std::size_t n = 0;
  bool fits = true;
  for (; fits && n < keys.size(); ++n) {
    const std::size_t group = group_of_hash(hash_of(keys[n]));
    fits = ++counts_[group] <= room(group);
  }
  if (n >= counts_.size()) {
    std::fill(counts_.begin(), counts_.end(), 0U);
  } else {
    for (const Key key : keys.first(n)) counts_[group_of_hash(hash_of(key))] = 0;
  }
  return fits;
}

// Marks in counts_ the groups that may be short of room; false if there is none.
bool Capacity::count_missing(std::span<const Key> keys, const Outcome* outcomes) noexcept {
  std::fill(counts_.begin(), counts_.end(), 0U);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kMissing) ++counts_[group_of_hash(hash_of(keys[i]))];
  }
  bool is_any_short = false;
  for (std::size_t group = 0; group < counts_.size(); ++group) {
    const bool is_short = counts_[group] > room(group);
    counts_[group] = static_cast<std::uint32_t>(is_short);
    is_any_short |= is_short;
  }
  return is_any_short;
}

// Lists the keys of marked groups once, and refuses from the lowest on. Groups that were only short
// for duplicates are no longer marked afterwards.
void Capacity::refuse_lowest(std::span<const Key> keys, Outcome* outcomes) {
  using Candidate = std::pair<std::size_t, std::uint64_t>;  // group, hash
  std::vector<Candidate> candidates;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    const std::uint64_t hash = hash_of(keys[i]);
    const std::size_t group = group_of_hash(hash);
    // A full group is decided without a list.
    if (counts_[group] != 0 && room(group) != 0) candidates.emplace_back(group, hash);
  }
  std::sort(candidates.begin(), candidates.end());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  std::vector<std::uint64_t> lowest(counts_.size());  // hash that is let in
  for (std::size_t group = 0; group < counts_.size(); ++group) {
    if (counts_[group] == 0) continue;
    const auto first = std::lower_bound(candidates.begin(), candidates.end(), Candidate{group, 0});
    const auto last =
        std::lower_bound(candidates.begin(), candidates.end(), Candidate{group + 1, 0});
    const auto num_refused = last - first - static_cast<std::int64_t>(room(group));
    counts_[group] = static_cast<std::uint32_t>(room(group) == 0 || num_refused > 0);
    if (room(group) != 0 && num_refused > 0) lowest[group] = (first + num_refused)->second;
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    const std::uint64_t hash = hash_of(keys[i]);
    const std::size_t group = group_of_hash(hash);
    if (counts_[group] != 0 && (room(group) == 0 || hash < lowest[group]))
      outcomes[i] = Outcome::kRefused;
  }
}

std::optional<Capacity::FullGroup> Capacity::refuse(std::span<const Key> keys, Outcome* outcomes) {
  std::optional<FullGroup> found;
  try {
    if (count_missing(keys, outcomes)) refuse_lowest(keys, outcomes);
  } catch (...) {
    std::fill(counts_.begin(), counts_.end(), 0U);
    throw;
  }
  for (std::size_t group = 0; group < counts_.size(); ++group) {
    if (std::exchange(counts_[group], 0U) != 0)
      found = {static_cast<std::int64_t>(group), quotas_[group], used_[group]};
  }
  return found;
}

void Capacity::find_excess(std::span<const std::uint64_t> hashes, std::vector<Excess>& found) {
  found.clear();
  found.reserve(std::min(hashes.size(), quotas_.size()));
  for (const std::uint64_t hash : hashes) ++counts_[group_of_hash(hash)];
  for (const std::uint64_t hash : hashes) {
    const std::size_t group = group_of_hash(hash);
    const std::uint32_t count = std::exchange(counts_[group], 0U);
    if (count > room(group))
      found.push_back({static_cast<std::uint32_t>(group), count - room(group)});
  }
}

std::vector<Capacity::Excess> Capacity::find_excess(std::int64_t max_rows) const {
  std::vector<Excess> found;
  for (std::int64_t group = owned_.begin; group < owned_.end; ++group) {
    const std::int64_t most = eviction_group_quota(max_rows, num_groups(), group);
    const std::int64_t count = used(static_cast<std::size_t>(group)) - most;
    if (count > 0)
      found.push_back({static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(count)});
  }
  return found;
}

void Capacity::add(std::span<const std::uint32_t> rows, const RowNumbers& numbers) noexcept {
  for (const std::uint32_t row : rows) ++used_[group_of_hash(hash_of(numbers.key(row)))];
  note_added(rows.size());
}

void Capacity::add(std::span<const std::uint64_t> hashes) noexcept {
  for (const std::uint64_t hash : hashes) ++used_[group_of_hash(hash)];
  note_added(hashes.size());
}

void Capacity::note_added(std::size_t count) noexcept {
  least_room_ -= std::min(least_room_, count);
  num_added_ += count;
}

void Capacity::remove(Key key) noexcept {
  --used_[group_of_hash(hash_of(key))];
  num_added_ = quotas_.size() + 1;  // there may be more room again
}

void Capacity::clear() noexcept {
  std::fill(used_.begin(), used_.end(), 0U);
  find_least_room();
}

template <typename Body>
void Capacity::for_each_key(const RowNumbers& numbers, const Body& body) {
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) != RowState::kFree && !numbers.is_leaving(row)) body(numbers.key(row));
  }
}

void Capacity::recount(const RowNumbers& numbers) noexcept {
  std::fill(used_.begin(), used_.end(), 0U);
  for_each_key(numbers, [&](Key key) { ++used_[group_of_hash(hash_of(key))]; });
  find_least_room();
}

std::optional<Capacity::FullGroup> Capacity::find_overfull(const RowNumbers& numbers) const {
  std::vector<std::uint32_t> used(quotas_.size());
  for_each_key(numbers, [&](Key key) { ++used[group_of_hash(hash_of(key))]; });
  for (std::size_t group = 0; group < used.size(); ++group) {
    if (used[group] > quotas_[group])
      return FullGroup{static_cast<std::int64_t>(group), quotas_[group], used[group]};
  }
  return std::nullopt;
}

std::int64_t Capacity::bytes() const noexcept {
  return static_cast<std::int64_t>((quotas_.capacity() + used_.capacity() + counts_.capacity()) *
                                   sizeof(std::uint32_t));
}

bool Capacity::is_right(const RowNumbers& numbers) const {
  std::vector<std::uint32_t> used(quotas_.size());
  for_each_key(numbers, [&](Key key) { ++used[group_of_hash(hash_of(key))]; });
  return used == used_;
}

}  // namespace internal
}  // namespace recsdk
