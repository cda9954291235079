// Finding the records of keys, by the indexes of frozen files and of what is in front of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "serving/frozen_file.h"
#include "serving/layer.h"
#include "serving/shared_image.h"

namespace recsdk::internal {

/// The files of a table by shard; null where one is not open.
struct FrozenShards {
  std::span<const FrozenView* const> views;  // (W,)

  const FrozenView* of(Key key) const {
    const auto count = static_cast<std::uint32_t>(views.size());
    return count == 1 ? views[0] : views[frozen_shard(key, count)];
  }
};

/// The record of each row that missing keys share, by row; null where it is not open. None: they
/// read the default value. A record's key is one of those that read it.
struct SharedRecords {
  std::vector<const std::byte*> records;
  SharedImage owned;  // what they lie in, if not in files

  bool is_empty() const { return records.empty(); }
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

/// Has missing keys among some, at most kKeysAtATime, read the rows that they share: in place of
/// each, and of its record, come the key of its shared row and that row's record. All other
/// records are those of their keys then. Notes which keys were missing.
void read_shared(const Sources& sources, const SharedRecords& shared, std::span<Key> keys,
                 const std::byte** records, std::uint8_t* are_missing);

/// Whether keys, any number, have a row.
std::vector<std::uint8_t> have_rows(const Sources& sources, std::span<const Key> keys);

}  // namespace recsdk::internal
