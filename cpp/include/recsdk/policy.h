// Who gets a row of an index or table, and who loses it: how max_rows divides over groups of keys,
// and the order in which the keys of a full group leave.
//
// The keys of an index fall into groups by the fixed hash that also gives their virtual shard, so
// that a group does not depend on rank, thread, order or hash_seed. Each group has room for an
// equal part of max_rows: a rank that has whole groups decides for itself what all ranks together
// would decide.
#pragma once

#include <cstdint>
#include <optional>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// The most groups: one of each virtual shard.
inline constexpr std::int64_t kMaxEvictionGroups = 65'536;

/// Groups [begin, end).
struct GroupRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  friend bool operator==(const GroupRange&, const GroupRange&) = default;
};

/// What a key's place in the order of eviction follows from; the lowest leaves first.
enum class EvictOrder : std::uint8_t {
  kLru = 0,    ///< when it was last seen
  kLfu = 1,    ///< how often it was seen
  kScore = 2,  ///< the score that the caller gave it last
};

/// What an index takes for the time.
enum class EvictClock : std::uint8_t {
  kStep = 0,  ///< the step; a call without one counts as the step after the latest
  kTime = 1,  ///< the times that come with keys, see MapOptions
};

/// Which keys leave when others find no room. A key is seen by each of its occurrences in a call
/// that inserts; other calls change nothing.
struct EvictConfig {
  EvictOrder order = EvictOrder::kLru;
  EvictClock clock = EvictClock::kStep;  ///< of kLru; of others kStep
  /// Of kLfu: steps, > 0, after which an occurrence counts half. Absent: all count alike for ever.
  std::optional<double> half_life = std::nullopt;
  /// Steps, >= 0, that a key stays at least, counted from the one in which it came.
  std::int64_t min_age = 0;
};

/// Where the clock of an index with eviction stands: what a save keeps of it beside rows.
struct EvictionState {
  std::int64_t step = 0;                   ///< of the last call that inserted
  std::optional<std::int64_t> lease_step;  ///< that its lease carried, if any
  bool is_begun = false;                   ///< there was such a call
  std::optional<std::int64_t> time;        ///< what Index::set_time set

  friend bool operator==(const EvictionState&, const EvictionState&) = default;
};

/// How many groups an index of so many rows has unless told otherwise. A power of two: as many as
/// leave each at least 4096 rows, but no fewer than 64 where that leaves 16, at most 65,536.
RECSDK_API std::int64_t default_eviction_groups(std::int64_t max_rows);

/// The key's group among `num_groups`, a power of two: ranges of virtual shards.
RECSDK_API std::int64_t eviction_group(Key key, std::int64_t num_groups);

/// How many rows the group has of max_rows. Groups differ by one at most.
RECSDK_API std::int64_t eviction_group_quota(std::int64_t max_rows, std::int64_t num_groups,
                                             std::int64_t group);

}  // namespace recsdk
