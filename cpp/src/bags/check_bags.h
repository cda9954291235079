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

/// Throws std::invalid_argument for bags whose parts do not fit each other, or that have a row at
/// or above `end_row`. `title()` as above.
template <typename Title>
void check_bags(const Bags& bags, RowNumber end_row, const Title& title) {
  check_parts(bags.rows.size(), bags.offsets, bags.weights, title);
  // Without branches: one pass that the compiler vectorizes. A negative row number is a huge
  // unsigned one.
  std::uint64_t highest = 0;
  bool has_rows = false;
  for (std::size_t i = 0; i < bags.rows.size(); ++i) {
    const bool has = has_row(bags.outcomes[i]);
    has_rows |= has;
    highest = std::max(highest, has ? static_cast<std::uint64_t>(bags.rows[i]) : 0);
  }
  if (has_rows && highest >= static_cast<std::uint64_t>(end_row)) {
    throw std::invalid_argument(title() + ": row number " +
                                std::to_string(static_cast<RowNumber>(highest)) +
                                " is out of range, the table has " + std::to_string(end_row) +
                                " rows; pass row numbers that map returned");
  }
}

}  // namespace recsdk::internal
