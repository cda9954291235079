// Which keys left a while ago, so that those that come back soon are counted.
//
// Records lie in slabs that never move, found by chains of a seeded hash. Those of each group of
// keys are a list in the order of (step of leaving, fixed hash): at its limit the first are lost.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

  /// Makes sure that so many keys can be noted without fail. Throws std::bad_alloc.
  void prepare(std::size_t num_keys);
  /// These keys, which have no record, leave in this step.
  template <typename Leaving>
  void note_left(const Leaving& leaving, std::int64_t step) noexcept {
    scratch_.clear();
    for (const auto& each : leaving) scratch_.push_back(hash_of(each.key));
    add_hashes(step);
  }
  /// The key comes in this step; true if it left no longer ago than churn_steps.
  bool comes_back(Key key, std::int64_t step) noexcept;
  void forget(Key key) noexcept { take(key); }
  void clear() noexcept;

  /// Records that left for others though their key could still have come back in time.
  std::uint64_t num_lost() const noexcept { return num_lost_; }
  std::int64_t bytes() const noexcept;
  /// What is broken, or empty. `rows` are the keys that have a row.
  std::string find_broken(const KeyMap& rows) const;

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;
  static constexpr std::uint32_t kSlabRecords = 1 << 10;

  struct Record {
    Key key = 0;
    std::int64_t step = 0;
    std::uint32_t previous = kNone;
    std::uint32_t next = kNone;
    std::uint32_t chained = kNone;
  };
  struct Group {
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
    std::uint32_t used = 0;
    std::uint32_t quota = 0;
  };
  using Place = std::pair<std::int64_t, std::uint64_t>;  // step, hash

  static std::uint64_t hash_of(Key key) noexcept {
    return virtual_shard_hash(static_cast<std::uint64_t>(key));
  }
  Record& at(std::uint32_t number) const noexcept {
    return slabs_[number / kSlabRecords][number % kSlabRecords];
  }
  Place place(std::uint32_t number) const noexcept {
    return {at(number).step, hash_of(at(number).key)};
  }
  Group& group_of_hash(std::uint64_t hash) noexcept {
    return groups_[static_cast<std::size_t>((hash & 0xFFFFU) >> shift_)];
  }
  std::uint32_t& chain(Key key) noexcept { return chains_[hash_(key) & (chains_.size() - 1)]; }
  bool is_over(std::uint32_t number, std::int64_t step) const noexcept;
  void add_hashes(std::int64_t step) noexcept;
  void make_room(Group& group, std::uint64_t hash, std::int64_t step) noexcept;
  void add(Group& group, std::uint64_t hash, std::int64_t step) noexcept;
  std::optional<std::int64_t> take(Key key) noexcept;

  std::int64_t steps_;
  int shift_ = 16;
  SeededHash hash_;
  std::vector<std::uint32_t> chains_;  // the first of each; a power of two
  std::vector<std::unique_ptr<Record[]>> slabs_;
  std::vector<Group> groups_;
  std::vector<std::uint64_t> scratch_;  // hashes of the keys of a call
  std::uint64_t most_ = 0;              // records of all groups
  std::uint32_t end_ = 0;               // one past the highest number ever taken
  std::uint32_t first_free_ = kNone;
  std::uint32_t num_free_ = 0;
  std::uint64_t num_lost_ = 0;
};

/// Throws std::invalid_argument naming the field that is wrong; `title` begins the message.
/// `groups` of max_rows, if it has some.
void check_churn(const EvictConfig& config, const std::string& title,
                 std::optional<std::int64_t> groups);

}  // namespace recsdk::internal
