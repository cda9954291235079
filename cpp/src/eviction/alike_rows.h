// Which rows have the same columns: a function of these says the same of all of them, so it is
// asked once. Keys of a call share its step, and most have been seen once or twice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "eviction/row_meta.h"
#include "rows/row_numbers.h"

namespace recsdk::internal {

/// What a function is given of keys (m,); what is not kept is empty.
struct Columns {
  std::vector<std::int64_t> steps, times, counts;
  std::vector<float> scores;

  std::size_t size() const noexcept { return steps.size(); }
};

/// The first bits are the best mixed.
std::uint64_t hash_of(const RowMeta::Shown& shown) noexcept;

/// The columns that a rule keeps, of different ones each a place.
class AlikeColumns {
 public:
  explicit AlikeColumns(const RowMeta& meta) : meta_(meta) {}

  std::size_t size() const noexcept { return columns_.size(); }
  const Columns& all() const noexcept { return columns_; }
  /// True if these are at that place, by their bits: minus zero is another number to a function.
  bool is(std::size_t place, const RowMeta::Shown& shown) const noexcept;
  RowMeta::Shown at(std::size_t place) const noexcept;
  void set(std::size_t place, const RowMeta::Shown& shown) noexcept;
  /// Throws std::bad_alloc; then nothing is added.
  void add(const RowMeta::Shown& shown);
  void clear() noexcept;
  std::int64_t bytes() const noexcept;

 private:
  const RowMeta& meta_;
  Columns columns_;
};

class AlikeRows {
 public:
  explicit AlikeRows(const RowMeta& meta) : meta_(meta), columns_(meta) {}

  /// Takes these rows (n,) in place of those before. Throws std::bad_alloc.
  void take(std::span<const std::uint32_t> rows, const RowNumbers& numbers);

  /// What is different among their columns (m,): the same may come again where there are
  /// more than slots.
  const Columns& columns() const noexcept { return columns_.all(); }
  /// Which of these each row has (n,), below m.
  std::span<const std::uint32_t> of_rows() const noexcept { return of_rows_; }

 private:
  static constexpr int kSlotBits = 12;

  std::uint32_t find_or_add(const RowMeta::Shown& shown);

  const RowMeta& meta_;
  AlikeColumns columns_;
  std::vector<std::uint32_t> of_rows_;
  // What was last seen of each hash; of rows before, what it leads to is another.
  std::array<std::uint32_t, std::size_t{1} << kSlotBits> slots_{};
};

}  // namespace recsdk::internal
