// Where the engine's rows live: records in slabs that never move.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "recsdk/row_layout.h"
#include "rows/slabs.h"

namespace recsdk::internal {

/// The records of rows, by row number. Not thread-safe: the table's locks guard it, except that
/// reading and writing records may run beside everything else.
class RowStore {
 public:
  explicit RowStore(const RowLayout& layout)
      : records_(layout.stride, layout.scalar_stride, kSlabBytes) {}

  /// Makes records [0, count) addressable. Throws Error(kOutOfMemory), std::bad_alloc.
  void grow(std::int64_t count) {
    if (count <= num_records_) return;
    records_.grow(count);
    num_records_ = count;
  }
  /// Records that can be addressed.
  std::int64_t num_records() const noexcept { return num_records_; }
  RowAddresses records() const noexcept { return records_.addresses(); }
  /// Bytes of a row's record.
  std::int64_t row_bytes() const noexcept { return records_.row_bytes(); }

  /// Backs the records of rows [begin, end) with memory, on this thread.
  void populate(RowNumber begin, RowNumber end) const noexcept { records_.populate(begin, end); }
  /// The same on several threads, see Slabs.
  void populate_pages(RowNumber begin, RowNumber end, int max_threads) const {
    records_.populate_pages(begin, end, max_threads);
  }
  /// Rows [0, end) are used: backs with memory a huge page that new rows will need soon. False if
  /// there is none.
  bool populate_ahead(RowNumber end) noexcept { return records_.populate_ahead(end); }

  void swap(RowStore& other) noexcept {
    std::swap(records_, other.records_);
    std::swap(num_records_, other.num_records_);
  }

 private:
  static constexpr std::int64_t kSlabBytes = std::int64_t{64} << 20;

  Slabs records_;
  std::int64_t num_records_ = 0;
};

}  // namespace recsdk::internal
