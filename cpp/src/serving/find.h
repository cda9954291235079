// Finding the records of keys by the index of a frozen file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "serving/frozen_file.h"

namespace recsdk::internal {

/// The files of a table by shard; null where one is not open.
struct FrozenShards {
  std::span<const FrozenView* const> views;  // (W,)

  const FrozenView* of(Key key) const {
    const auto count = static_cast<std::uint32_t>(views.size());
    return count == 1 ? views[0] : views[frozen_shard(key, count)];
  }
};

/// Writes for each key a record whose tag is the key's, or null if it is missing. The record's key
/// is still to be compared; if it is another, find_record tells. All shards of the keys are open.
void find_candidates(const FrozenShards& shards, std::span<const Key> keys,
                     const std::byte** records);

/// The record of a key, null if it has none. `context` is a FrozenShards.
const std::byte* find_record(const void* context, Key key);

}  // namespace recsdk::internal
