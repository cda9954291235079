// The row numbers of a batch's keys, of many tables, as one array: what a device takes that keeps
// the rows of these tables in one store. A call that maps keys may write it at once: see
// StoreNumbers in recsdk/index.h.
#pragma once

#include <cstdint>
#include <span>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// Where the rows of one table lie in a store that has those of several.
struct StorePlace {
  std::int64_t first_row = 0;  ///< where they begin
  /// Of the store: what a key without a row reads. With num_shared it is the first of as many rows,
  /// and the key's is the one whose number `map` gave it.
  std::int64_t default_row = 0;
  std::int64_t num_shared = 0;
};

/// Keys of one table, mapped.
struct MappedRows {
  std::span<const RowNumber> rows;    ///< (N,), as `map` gave them
  std::span<const Outcome> outcomes;  ///< (N,); empty: every key has a row
  StorePlace place;
  /// (N,), in place of `rows`, which are empty.
  // With an initializer it may be left out without a warning of missing ones.
  // NOLINTNEXTLINE(readability-redundant-member-init)
  std::span<const std::int32_t> narrow_rows = {};
};

/// Writes the store's number of each key's row, part by part. The result does not depend on the
/// number of threads. Throws std::invalid_argument, with `out` unspecified, if its size is not that
/// of the parts, or a number is negative or too large for it or its part.
RECSDK_API void join_rows(std::span<const MappedRows> parts, std::span<std::int32_t> out);
RECSDK_API void join_rows(std::span<const MappedRows> parts, std::span<std::int64_t> out);

}  // namespace recsdk
