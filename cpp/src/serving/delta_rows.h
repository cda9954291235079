// What a ServingDelta gathers, until it becomes a layer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recsdk/serving/serving_table.h"
#include "serving/find.h"
#include "serving/layer.h"

namespace recsdk {

struct ServingDelta::Impl {
  std::string name;
  FrozenDType dtype = FrozenDType::kFloat32;
  std::int64_t dim = 0;
  std::uint64_t hash_seed = 0;

  std::int64_t num_rows = 0;
  std::vector<std::vector<std::byte>> records;  // those of each call
  std::vector<Key> erased;
  internal::SharedImage shared;  // all of them, or none

  std::int64_t record_bytes() const;
};

namespace internal {

/// A delta in front of what a table has.
struct Prepared {
  std::shared_ptr<const Layer> layer;  // null if the delta changes nothing
  std::int64_t num_more_rows = 0;      // fewer, if negative
};

/// Sorts a delta. Keys whose shard is not open are left out, and erased keys that nothing has.
/// Throws std::invalid_argument for a key that came twice.
Prepared prepare(const ServingDelta::Impl& delta, const Sources& sources);

}  // namespace internal
}  // namespace recsdk
