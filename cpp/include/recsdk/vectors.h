// Packs rows of matrices one after the other, as they travel between processes, and unpacks them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recsdk/export.h"

namespace recsdk {

/// Vectors that lie one after the other in one dimension.
struct PackedPart {
  std::int64_t start = 0;              ///< of the first vector, in floats
  const std::int32_t* rows = nullptr;  ///< which rows of the block they are; null: all of them
  std::int64_t num_rows = 0;           ///< how many; if `rows` is null, as many as the block has
};

/// Rows that vectors are added up to: row i at to[i * stride], `width` floats.
struct UnpackBlock {
  float* to = nullptr;
  std::int64_t stride = 0;  ///< in floats, >= width
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  std::span<const PackedPart> parts;
};

/// Rows that vectors are copied from: row i at from[i * stride], `width` floats.
struct PackBlock {
  const float* from = nullptr;
  std::int64_t stride = 0;  ///< in floats; >= width, or 0: all rows are one vector
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  std::span<const PackedPart> parts;
};

/// Writes to each row the sum of its vectors, in the order of the parts; 0 where there are none.
/// Blocks may not overlap. Spread over the thread pool; the result does not depend on threads.
///
/// All arguments are checked first: throws std::invalid_argument, with nothing written, for a part
/// outside of `packed` or a row outside of its block.
RECSDK_API void unpack_vectors(std::span<const float> packed, std::span<const UnpackBlock> blocks);

/// Writes to each part its rows' vectors, divided by `divisor`; leaves the rest of `packed` as it
/// is. Parts may not overlap. Otherwise as `unpack_vectors`.
RECSDK_API void pack_vectors(std::span<const PackBlock> blocks, float divisor,
                             std::span<float> packed);

/// Stretches of vectors, S in all, as they lie one after the other: process by process.
struct VectorStretches {
  std::span<const std::int64_t> counts;     ///< (S,), places of their numbers of vectors
  std::span<const std::int64_t> widths;     ///< (S,), floats of a vector
  std::span<const std::int64_t> processes;  ///< (S,), ascending, from 0 on
};

/// How many floats each process sends.
struct SentFloats {
  std::vector<std::int64_t> used;    ///< those of its vectors
  std::vector<std::int64_t> padded;  ///< with those that fill up
};

/// Writes where each stretch begins (S,), if every process' floats are filled up to a `multiple`.
/// Stretch s has counts[stretches.counts[s]] vectors.
/// Throws std::invalid_argument for counts that are negative or not there, for stretches that do
/// not fit each other, for more than 65,536 processes, and for more floats than an int64 counts.
RECSDK_API SentFloats lay_out_vectors(std::span<const std::int64_t> counts,
                                      const VectorStretches& stretches, std::int64_t num_processes,
                                      std::int64_t multiple, std::span<std::int64_t> starts);

}  // namespace recsdk
