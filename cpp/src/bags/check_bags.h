// What is checked of bags that a caller passes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "recsdk/table.h"
#include "recsdk/types.h"

namespace recsdk::internal {

/// Throws std::invalid_argument for offsets and weights that do not fit `num_keys` keys. `title()`
/// names in messages whose keys they are; called only then.
template <typename Title>
void check_parts(std::size_t num_keys, std::span<const std::int64_t> offsets,
                 std::span<const float> weights, const Title& title) {
  if (!weights.empty() && weights.size() != num_keys) {
    throw std::invalid_argument(title() + ": weights has " + std::to_string(weights.size()) +
                                " elements for " + std::to_string(num_keys) +
                                " keys; pass one per key, or none");
  }
  if (offsets.empty()) return;
  if (offsets.front() != 0 || offsets.back() != static_cast<std::int64_t>(num_keys)) {
    throw std::invalid_argument(title() + ": offsets run from " + std::to_string(offsets.front()) +
                                " to " + std::to_string(offsets.back()) +
                                "; pass B + 1 offsets from 0 to the number of keys, " +
                                std::to_string(num_keys));
  }
  if (!std::is_sorted(offsets.begin(), offsets.end())) {
    throw std::invalid_argument(title() +
                                ": offsets descend somewhere; pass them in ascending order");
  }
}

/// Whether a key has a row at or above `end_row`, or a negative one.
inline bool has_row_outside(const Bags& bags, RowNumber end_row) {
  // One pass without branches, which the compiler vectorizes: the highest bit of a number is set if
  // it is negative, and of what is left to the last row if it is above that.
  const RowNumber* const rows = bags.rows.data();
  const Outcome* const outcomes = bags.outcomes.data();
  const auto last = static_cast<std::uint64_t>(end_row) - 1;
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < bags.rows.size(); ++i) {
    const auto row = static_cast<std::uint64_t>(rows[i]);
    const std::uint64_t mask = 0U - static_cast<std::uint64_t>(has_row(outcomes[i]));
    bits |= (row | (last - row)) & mask;
  }
  return bits >> 63 != 0;
}

/// Throws std::invalid_argument for bags whose parts do not fit each other, or that have a row at
/// or above `end_row`. `title()` as above.
template <typename Title>
void check_bags(const Bags& bags, RowNumber end_row, const Title& title) {
  check_parts(bags.rows.size(), bags.offsets, bags.weights, title);
  if (!has_row_outside(bags, end_row)) return;
  std::uint64_t highest = 0;
  for (std::size_t i = 0; i < bags.rows.size(); ++i) {
    if (has_row(bags.outcomes[i]))
      highest = std::max(highest, static_cast<std::uint64_t>(bags.rows[i]));
  }
  throw std::invalid_argument(title() + ": row number " +
                              std::to_string(static_cast<RowNumber>(highest)) +
                              " is out of range, the table has " + std::to_string(end_row) +
                              " rows; pass row numbers that map returned");
}

}  // namespace recsdk::internal
