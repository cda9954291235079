// What is checked of bags that a caller passes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "kernels/check_parts.h"
#include "recsdk/table.h"
#include "recsdk/types.h"
#include "util/must.h"

namespace recsdk::internal {

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
/// or above `end_row`. `title()` as above; `wanted` says what row numbers must be beside that.
template <typename Title>
void check_bags(const Bags& bags, RowNumber end_row, const Title& title,
                const char* wanted = "those that map returned") {
  check_parts(bags.rows.size(), bags.offsets, bags.weights, title);
  if (!has_row_outside(bags, end_row)) return;
  std::uint64_t highest = 0;
  for (std::size_t i = 0; i < bags.rows.size(); ++i) {
    if (has_row(bags.outcomes[i]))
      highest = std::max(highest, static_cast<std::uint64_t>(bags.rows[i]));
  }
  const std::string is_below = ", below " + std::to_string(end_row);
  throw std::invalid_argument(
      title() + ": " +
      must("row numbers", "be " + std::string(wanted) + is_below, static_cast<RowNumber>(highest)));
}

/// Throws std::invalid_argument unless there is a vector of `width` numbers for each bag of a
/// block. `title()` as above.
template <typename Title>
void check_gradient(const GradBlock& block, std::int64_t width, const Title& title) {
  if (block.bags.num_bags() == 0) return;
  if (block.grad == nullptr)
    throw std::invalid_argument(title() + ": the gradient must not be null");
  const std::int64_t most = most_stride(block.bags.num_bags());
  if (block.stride != 0 && (block.stride < width || block.stride > most))
    throw std::invalid_argument(
        title() + ": " +
        must("the stride of the gradient",
             "be 0, or from the width, " + std::to_string(width) + ", to " + std::to_string(most),
             block.stride));
}

}  // namespace recsdk::internal
