// The rows of a table that keys without one of their own share.
#pragma once

#include <cstdint>
#include <span>

#include "recsdk/row_layout.h"
#include "recsdk/table.h"
#include "rows/row_store.h"
#include "rows/slabs.h"

namespace recsdk::internal {

/// Records by number, each with the key that stands for it. The lock of the table's rows guards it.
class SharedStore {
 public:
  /// With fresh state; weights are yet to be written. `layout` outlives it. Throws std::bad_alloc,
  /// Error(kOutOfMemory).
  SharedStore(const RowLayout& layout, std::int64_t num_rows);

  std::int64_t size() const noexcept { return num_rows_; }
  RowAddresses records() const noexcept { return rows_.records(); }
  /// A Key per row.
  RowAddresses keys() const noexcept { return keys_.addresses(); }
  Key key(std::int64_t row) const noexcept { return *keys_.at<Key>(row); }
  /// Bytes of memory that they take.
  std::int64_t num_bytes() const noexcept { return num_rows_ * rows_.row_bytes(); }

  /// What they hold. Throws std::bad_alloc.
  SharedRows values() const;
  /// Writes weights (m, D), and state (m, S) or null for that of new rows, of rows by key (m,).
  /// False, with nothing written, if some key stands for none.
  bool write(std::span<const Key> keys, const float* weights, const float* state) const;

 private:
  const RowLayout* layout_;
  std::int64_t num_rows_;
  RowStore rows_;
  Slabs keys_;
};

}  // namespace recsdk::internal
