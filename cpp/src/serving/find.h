// Finding the records of keys, by the indexes of frozen files and of what is in front of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "serving/frozen_file.h"
#include "serving/layer.h"

namespace recsdk::internal {

/// The files of a table by shard; null where one is not open.
struct FrozenShards {
  std::span<const FrozenView* const> views;  // (W,)

  const FrozenView* of(Key key) const {
    const auto count = static_cast<std::uint32_t>(views.size());
    return count == 1 ? views[0] : views[frozen_shard(key, count)];
  }
};

/// All places of a table's records: layers before the files, the newest first.
struct Sources {
  FrozenShards files;
  std::span<const std::shared_ptr<const Layer>> layers;
};

/// Keys that are found at a time; what is known of them lies on the stack.
inline constexpr std::size_t kKeysAtATime = 2048;

/// Writes for each key, at most kKeysAtATime, a record whose tag is the key's, or null if it is
/// missing. The record's key is still to be compared; if it is another, find_record tells. All
/// shards of the keys are open.
void find_candidates(const Sources& sources, std::span<const Key> keys, const std::byte** records);

/// The record of a key, null if it has none. `context` is a Sources.
const std::byte* find_record(const void* context, Key key);

/// Whether keys, any number, have a row.
std::vector<std::uint8_t> have_rows(const Sources& sources, std::span<const Key> keys);

}  // namespace recsdk::internal
