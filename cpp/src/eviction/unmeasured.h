// Which rows the next look measures: all others are what the look before found them to be.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "rows/row_bits.h"
#include "rows/row_numbers.h"

namespace recsdk::internal {

/// Rows whose norm, or what a function makes of their columns, may have changed since the latest
/// look. The index's lock guards it; a thread that holds the lock of the rows may note some too.
class Unmeasured {
 public:
  /// Makes room for rows below `num_rows`.
  void grow(std::int64_t num_rows) { rows_.grow(num_rows); }

  void note(std::int64_t row) noexcept { rows_.set(row); }
  /// The rows of sorted items [begin, end).
  void note(const GradItem* items, std::int64_t begin, std::int64_t end) noexcept {
    rows_.set(items, begin, end);
  }
  /// All rows that have keys, whatever is noted.
  void note_all() noexcept { has_all_ = true; }

  /// Takes out the rows that have keys, ascending: before they are read, so that a change while
  /// they are read is not missed. Throws std::bad_alloc; then all are still there.
  std::vector<std::uint32_t> take(const RowNumbers& numbers);
  /// They were taken, and not measured.
  void put_back(std::span<const std::uint32_t> rows) noexcept;

  std::int64_t bytes() const noexcept { return rows_.bytes(); }

 private:
  RowBits rows_;
  bool has_all_ = false;
};

/// The rows that have keys, ascending, but for those that are leaving.
std::vector<std::uint32_t> used_rows(const RowNumbers& numbers);

/// Some thousand of them, evenly spread, or all; and how many rows each stands for.
struct UsedSample {
  std::vector<std::uint32_t> rows;
  std::size_t stride = 1;
};
UsedSample sample_used(std::int64_t num_used, const RowNumbers& numbers);

}  // namespace recsdk::internal
