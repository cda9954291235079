// Which new keys find no room, by the words of recsdk/policy.h: what an index is compared with.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_set>
#include <utility>

#include "recsdk/policy.h"
#include "util/hash.h"

namespace recsdk::test {

/// Of keys (N,) that a call brings, those that find no room beside the keys of `rows`, a map by
/// key. In each group the lowest by their hash.
template <typename Rows>
std::unordered_set<Key> refused_keys(std::span<const Key> keys, const Rows& rows,
                                     std::optional<std::int64_t> max_rows,
                                     std::optional<std::int64_t> groups = std::nullopt) {
  std::unordered_set<Key> refused;
  if (!max_rows) return refused;
  const std::int64_t num_groups = groups.value_or(default_eviction_groups(*max_rows));
  const auto group_of = [&](Key key) { return eviction_group(key, num_groups); };
  std::map<std::int64_t, std::int64_t> used;
  for (const auto& row : rows) ++used[group_of(row.first)];
  std::map<std::int64_t, std::set<std::pair<std::uint64_t, Key>>> fresh;
  for (const Key key : keys) {
    if (rows.contains(key)) continue;
    const std::uint64_t hash = internal::virtual_shard_hash(static_cast<std::uint64_t>(key));
    fresh[group_of(key)].emplace(hash, key);
  }
  for (const auto& [group, added] : fresh) {
    std::int64_t excess =
        used[group] + std::ssize(added) - eviction_group_quota(*max_rows, num_groups, group);
    for (auto it = added.begin(); it != added.end() && excess > 0; ++it, --excess)
      refused.insert(it->second);
  }
  return refused;
}

}  // namespace recsdk::test
