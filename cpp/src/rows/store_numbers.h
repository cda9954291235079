// The numbers of a table's rows in a store that has those of several tables.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "recsdk/join_rows.h"
#include "recsdk/types.h"

namespace recsdk::internal {

/// Of a key without a row; negative if the place has no such row.
inline std::int64_t default_number(const StorePlace& place, RowNumber number) {
  if (place.num_shared == 0) return place.default_row;
  const bool is_one = number >= 0 && number < place.num_shared;
  return is_one ? place.default_row + number : -1;
}

/// Whether all keys have rows.
inline bool all_have_rows(std::span<const Outcome> outcomes) {
  std::uint8_t any = 0;
  for (const Outcome outcome : outcomes) any |= static_cast<std::uint8_t>(!has_row(outcome));
  return any == 0;
}

/// Of keys that all have rows. Returns all bits of the numbers.
template <typename Row, typename Number>
std::uint64_t write_shifted(std::span<const Row> rows, std::int64_t first_row, Number* out) {
  std::int64_t bits = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t row = rows[i] + first_row;
    bits |= row;
    out[i] = static_cast<Number>(row);
  }
  return static_cast<std::uint64_t>(bits);
}

/// Of keys some of which have none.
template <typename Row, typename Number>
std::uint64_t write_chosen(std::span<const Row> rows, std::span<const Outcome> outcomes,
                           const StorePlace& place, Number* out) {
  std::int64_t bits = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t row =
        has_row(outcomes[i]) ? rows[i] + place.first_row : default_number(place, rows[i]);
    bits |= row;
    out[i] = static_cast<Number>(row);
  }
  return static_cast<std::uint64_t>(bits);
}

/// Writes the numbers of rows (N,) to `out` (N,). `outcomes` (N,), or none: every key has a row.
/// Returns whether all numbers fit.
template <typename Row, typename Number>
bool write_store_numbers(std::span<const Row> rows, std::span<const Outcome> outcomes,
                         const StorePlace& place, Number* out) {
  constexpr std::size_t kBlock = 1024;  // few of many batches have keys without rows
  std::uint64_t bits = 0;
  for (std::size_t begin = 0; begin < rows.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, rows.size() - begin);
    const auto own = rows.subspan(begin, count);
    const auto their = outcomes.empty() ? outcomes : outcomes.subspan(begin, count);
    bits |= all_have_rows(their) ? write_shifted(own, place.first_row, out + begin)
                                 : write_chosen(own, their, place, out + begin);
  }
  return bits <= static_cast<std::uint64_t>(std::numeric_limits<Number>::max());
}

}  // namespace recsdk::internal
