// Columns of rows, as readers of training data have them: put in a random order, and interleaved.
//
// N rows, P parts one after the other that have them, S stretches that get them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recsdk/export.h"

namespace recsdk {

/// One column: where its rows lie, and where they go.
struct ShuffledColumn {
  std::int64_t row_bytes = 0;
  std::span<const void* const> parts;  ///< (P,)
  std::span<void* const> stretches;    ///< (S,), which overlap neither each other nor the parts
};

/// A random order of N rows: each of the N! as likely, but for what 32 random bits can say.
///
/// The same for equal `num_rows` and `seed` on every machine. Columns are put in this order in two
/// passes within the caches: rows first go to one of up to 256 groups, in which they are then put
/// in order. An id takes half the time of gathering it from a column past the second level of
/// cache. A column that takes at most half of that level is copied there and gathered, for two
/// thirds of the time. Rows of 32 bytes and more are copied once.
/// Source: C. R. Rao, "Generation of random permutations of given number of elements using
/// random sampling numbers", Sankhya 1961.
///
/// Memory: 8 bytes a row. One may be used by several threads at once.
class RECSDK_API Shuffle {
 public:
  /// Throws std::invalid_argument for a negative number or 2^32 rows and more, std::bad_alloc.
  Shuffle(std::int64_t num_rows, std::uint64_t seed);

  std::int64_t num_rows() const { return static_cast<std::int64_t>(place_in_order_.size()); }

  /// Writes which row comes first, second and so on, (N,). Throws std::invalid_argument for room
  /// for more or fewer, std::bad_alloc.
  void write_order(std::span<std::int64_t> order) const;

  /// Puts columns in order: the first `skip` rows of the order are left out, and the others go to
  /// the stretches, one after the other. `part_rows` (P,) and `stretch_rows` (S,) say how many rows
  /// each part and stretch has; the parts together have N, the stretches N - skip.
  ///
  /// All arguments are checked first: throws std::invalid_argument, with nothing written, and
  /// std::bad_alloc likewise. On the caller's thread. Takes memory of at most 31 bytes a row
  /// beside, and 8 if rows of some column are wider.
  void write(std::span<const std::int64_t> part_rows, std::span<const std::int64_t> stretch_rows,
             std::int64_t skip, std::span<const ShuffledColumn> columns) const;

 private:
  std::vector<std::uint32_t> rows_in_order() const;

  // In its group, where groups lie one after the other; empty: where the row was.
  std::vector<std::uint32_t> place_of_row_;
  std::vector<std::uint32_t> place_in_order_;  // of the row that comes first, second and so on
};

/// Writes columns of numbers (N,) as one matrix (N, columns), and returns whether all are finite.
/// On the caller's thread. Throws nothing.
RECSDK_API bool interleave(std::span<const float* const> columns, std::int64_t num_rows,
                           float* matrix);

}  // namespace recsdk
