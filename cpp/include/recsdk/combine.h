// Combines equal keys of a batch before it travels: each key once, with the sum of its gradients.
#pragma once

#include <cstdint>
#include <span>

#include "recsdk/export.h"
#include "recsdk/table.h"
#include "recsdk/types.h"

namespace recsdk {

/// Writes the distinct keys in the order in which they first occur, and for each key the index of
/// its distinct key; both results have room for all keys. Returns the number of distinct keys.
///
/// Throws std::invalid_argument for results of another size and for 2^32 - 1 keys or more,
/// std::bad_alloc. Cost: linear in the number of keys; nobody can choose keys that collide.
RECSDK_API std::int64_t distinct_keys(std::span<const Key> keys, std::span<Key> distinct,
                                      std::span<std::int64_t> which);

/// Bags whose row numbers are places in a result: a key with row i adds its gradient to the vector
/// at sums[i * width].
struct CombineBlock {
  GradBlock block;  ///< `weights_grad` is not used
  std::int64_t width = 0;
  std::int64_t num_sums = 0;
  float* sums = nullptr;  ///< (num_sums, width)
};

/// Writes the sums of the gradients of equal rows, added in the order of the keys. Keys without a
/// row are left out; a sum without keys is 0. So an update with the sums, as gradients of bags of
/// one key each, equals an update with the blocks, but for the order of additions among several
/// blocks.
///
/// All arguments are checked first: throws std::invalid_argument, with nothing written. Spread over
/// the thread pool block by block; the result does not depend on threads.
RECSDK_API void combine_gradients(std::span<const CombineBlock> blocks);

}  // namespace recsdk
