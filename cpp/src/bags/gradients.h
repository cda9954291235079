// From the gradients of pooled bags to a list of (row, gradient) in the order in which rows are
// updated.
#pragma once

#include <cstdint>
#include <span>

#include "bags/buffer.h"
#include "kernels/kernels.h"
#include "recsdk/table.h"

namespace recsdk::internal {

/// Occurrences of rows a piece of a parallel update.
inline constexpr std::int64_t kUpdateGrain = 8192;

/// All occurrences of all rows in one backward, sorted by row; those of one row in the order of
/// blocks and keys.
struct SortedGradients {
  Buffer<GradItem> items;
  Buffer<GradSource> sources;

  /// First item at or after `i` that begins a row.
  std::int64_t row_border(std::int64_t i) const;
  /// Distinct rows. Cost: goes over all items.
  std::int64_t num_rows() const;
};

/// Which keys' gradients an update takes: those of keys with a row of their own, or of the others,
/// which share rows.
enum class GradientsOf : std::uint8_t { kOwnRows, kSharedRows };

/// Rows must be below `end_row`. The same for any `max_threads`. Throws std::bad_alloc,
/// Error(kCapacity) for 2^32 keys with rows, or bags, or more.
SortedGradients sort_gradients(std::span<const GradBlock> blocks, RowNumber end_row,
                               int max_threads, GradientsOf which = GradientsOf::kOwnRows);

}  // namespace recsdk::internal
