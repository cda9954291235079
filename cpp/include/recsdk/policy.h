// Who gets a row of an index or table: how max_rows divides over groups of keys.
//
// The keys of an index fall into groups by the fixed hash that also gives their virtual shard, so
// that a group does not depend on rank, thread, order or hash_seed. Each group has room for an
// equal part of max_rows: a rank that has whole groups decides for itself what all ranks together
// would decide.
#pragma once

#include <cstdint>

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

/// How many groups an index of so many rows has unless told otherwise. A power of two: as many as
/// leave each at least 4096 rows, but no fewer than 64 where that leaves 16, at most 65,536.
RECSDK_API std::int64_t default_eviction_groups(std::int64_t max_rows);

/// The key's group among `num_groups`, a power of two: ranges of virtual shards.
RECSDK_API std::int64_t eviction_group(Key key, std::int64_t num_groups);

/// How many rows the group has of max_rows. Groups differ by one at most.
RECSDK_API std::int64_t eviction_group_quota(std::int64_t max_rows, std::int64_t num_groups,
                                             std::int64_t group);

}  // namespace recsdk
