// Room for keys: max_rows, divided over groups of keys.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recsdk/policy.h"
#include "recsdk/types.h"
#include "rows/row_numbers.h"
#include "util/hash.h"

namespace recsdk::internal {

/// How many keys of each group there are, and which of a call find no room. The index's lock guards
/// it. What it decides depends on the keys of the call and of the index, never on their order.
class Capacity {
 public:
  /// Of groups outside `owned` there is no room at all.
  Capacity(std::int64_t max_rows, std::int64_t num_groups, std::optional<GroupRange> owned);

  /// Rows of all its groups.
  std::int64_t max_rows() const noexcept { return max_rows_; }
  std::int64_t num_groups() const noexcept { return static_cast<std::int64_t>(quotas_.size()); }

  /// True if these keys find room, however many of them are new. Cost: a few nanoseconds a key, or
  /// none where every group has room for all.
  bool has_room_for(std::span<const Key> keys) noexcept;
  /// True if every group has room for so many keys. Cost: next to nothing.
  bool has_room_for(std::size_t num_keys) noexcept;

  /// A group that has too little room.
  struct FullGroup {
    std::int64_t group = 0;
    std::int64_t quota = 0;
    std::int64_t used = 0;  ///< its keys that have rows, or are to have some
  };
  /// Of the keys (N,) left kMissing, those that find no room become kRefused: in each group those
  /// that are lowest by their hash. Returns one of the full groups if there are any. Throws
  /// std::bad_alloc; then nothing has changed.
  std::optional<FullGroup> refuse(std::span<const Key> keys, Outcome* outcomes);

  /// A group that keys which are about to come make too large, and by how many.
  struct Excess {
    std::uint32_t group = 0;
    std::uint32_t count = 0;
  };
  /// Writes them to `found`, in any order; the keys, distinct, are given by their hashes. Throws
  /// std::bad_alloc; then nothing has changed.
  void find_excess(std::span<const std::uint64_t> hashes, std::vector<Excess>& found);
  /// The groups that have more than their part of `max_rows`, divided as max_rows is.
  std::vector<Excess> find_excess(std::int64_t max_rows) const;

  static std::uint64_t hash_of(Key key) noexcept {
    return virtual_shard_hash(static_cast<std::uint64_t>(key));
  }
  static Key key_of(std::uint64_t hash) noexcept {
    return static_cast<Key>(virtual_shard_key(hash));
  }
  std::size_t group_of_hash(std::uint64_t hash) const noexcept {
    return static_cast<std::size_t>((hash & 0xFFFFU) >> shift_);
  }
  std::uint32_t group_of(Key key) const noexcept {
    return static_cast<std::uint32_t>(group_of_hash(hash_of(key)));
  }

  /// The keys of these rows have come.
  void add(std::span<const std::uint32_t> rows, const RowNumbers& numbers) noexcept;
  /// The same of keys by their hashes.
  void add(std::span<const std::uint64_t> hashes) noexcept;
  void remove(Key key) noexcept;
  void clear() noexcept;
  /// Counts anew: all keys that have rows. A group may then have more than its quota.
  void recount(const RowNumbers& numbers) noexcept;
  /// A group of which these keys, by row number, are too many.
  std::optional<FullGroup> find_overfull(const RowNumbers& numbers) const;

  std::int64_t used(std::size_t group) const noexcept { return used_[group]; }
  std::int64_t quota(std::size_t group) const noexcept { return quotas_[group]; }
  std::int64_t bytes() const noexcept;
  /// True if the counts are those of the keys that have rows.
  bool is_right(const RowNumbers& numbers) const;

 private:
  std::uint32_t room(std::size_t group) const noexcept {
    return used_[group] < quotas_[group] ? quotas_[group] - used_[group] : 0;
  }
  void note_added(std::size_t count) noexcept;
  template <typename Body>
  static void for_each_key(const RowNumbers& numbers, const Body& body);
  void find_least_room() noexcept;
  bool count_missing(std::span<const Key> keys, const Outcome* outcomes) noexcept;
  void refuse_lowest(std::span<const Key> keys, Outcome* outcomes);

  int shift_;
  std::int64_t max_rows_ = 0;
  std::vector<std::uint32_t> quotas_;
  std::vector<std::uint32_t> used_;
  std::vector<std::uint32_t> counts_;  // of one call; zeros between calls
  GroupRange owned_;
  bool owns_all_;
  std::size_t least_room_ = 0;  // at most as much as any owned group has
  std::size_t num_added_ = 0;   // keys since least_room_ was exact
};

}  // namespace recsdk::internal
