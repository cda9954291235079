// Which keys left a while ago, so that those that come back soon are counted.
//
// Keys fall into groups. At its limit a group forgets those that are first in the order of (step of
// leaving, fixed hash). The keys of a call come and leave group by group, so that what is kept of
// one group stays in the caches meanwhile.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eviction/departures.h"
#include "keymap/key_map.h"
#include "recsdk/policy.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::internal {

/// What EvictConfig::churn_steps asks for. The index's lock guards it.
class Churn {
 public:
  /// `groups` of max_rows, if it has some.
  Churn(const EvictConfig& config, std::optional<std::int64_t> groups,
        std::optional<GroupRange> owned, std::uint64_t hash_seed);

  /// Makes sure that these keys, or parts of them, can be noted without fail. Throws
  /// std::bad_alloc.
  template <typename Leaving>
  void prepare(const Leaving& leaving) {
    hashes_.reserve(leaving.size());
    list(leaving);
    for_groups(
        [&](Departures& group, auto hashes, auto /*next*/) { group.reserve(hashes.size(), mix_); });
  }
  /// These keys, which are not here, leave in this step.
  template <typename Leaving>
  void note_left(const Leaving& leaving, std::int64_t step) noexcept {
    list(leaving);
    for_groups([&](Departures& group, auto hashes, auto next) {
      if (!next.empty()) groups_[group_of(next.front())].prefetch_all(next, mix_);
      num_lost_ += group.add(hashes, step, steps_, mix_);
    });
  }
  /// Keys, by their virtual_shard_hash, come in this step: how many of them left no longer ago than
  /// churn_steps.
  std::uint64_t count_returned(std::span<const std::uint64_t> hashes, std::int64_t step) noexcept;
  void forget(Key key) noexcept;
  void clear() noexcept;

  /// Keys that were forgotten for others though they could still have come back in time.
  std::uint64_t num_lost() const noexcept { return num_lost_; }
  std::int64_t bytes() const noexcept;
  /// What is broken, or empty. `rows` are the keys that have a row.
  std::string find_broken(const KeyMap& rows) const;

 private:
  std::size_t group_of(std::uint64_t hash) const noexcept {
    return static_cast<std::size_t>((hash & 0xFFFFU) >> shift_);
  }
  /// Their hashes by group, ascending in each; there is room.
  template <typename Leaving>
  void list(const Leaving& leaving) {
    hashes_.clear();
    for (const auto& each : leaving)
      hashes_.push_back(virtual_shard_hash(static_cast<std::uint64_t>(each.key)));
    sort_by_group();
  }
  void sort_by_group() noexcept;
  /// Calls body(group, its hashes, those of the next group).
  template <typename Body>
  void for_groups(const Body& body) {
    std::span<const std::uint64_t> rest = hashes_;
    const auto take_group = [&] {
      std::size_t count = 0;
      while (count < rest.size() && group_of(rest[count]) == group_of(rest.front())) ++count;
      const auto taken = rest.first(count);
      rest = rest.subspan(count);
      return taken;
    };
    for (auto hashes = take_group(); !hashes.empty();) {
      const auto next = take_group();
      body(groups_[group_of(hashes.front())], hashes, next);
      hashes = next;
    }
  }

  std::int64_t steps_;
  int shift_ = 16;
  SeededHash mix_;
  std::vector<Departures> groups_;
  std::vector<std::uint64_t> hashes_;  // of the keys of a call
  std::uint64_t num_lost_ = 0;
};

/// Throws std::invalid_argument naming the field that is wrong; `title` begins the message.
/// `groups` of max_rows, if it has some.
void check_churn(const EvictConfig& config, const std::string& title,
                 std::optional<std::int64_t> groups);

}  // namespace recsdk::internal
