// What is checked of the parts of bags that a caller passes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "util/must.h"

namespace recsdk::internal {

/// The largest stride of a matrix that any array can have, of this many rows of float32.
inline std::int64_t most_stride(std::int64_t num_rows) {
  return PTRDIFF_MAX / static_cast<std::int64_t>(sizeof(float)) /
         std::max<std::int64_t>(num_rows, 1);
}

/// Throws std::invalid_argument for offsets and weights that do not fit `num_keys` keys. `title()`
/// names in messages whose keys they are; called only then.
template <typename Title>
void check_parts(std::size_t num_keys, std::span<const std::int64_t> offsets,
                 std::span<const float> weights, const Title& title) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title() + ": " + what);
  };
  if (!weights.empty() && weights.size() != num_keys)
    fail(must_fit_keys("weights", num_keys, weights.size()) + "; or pass none");
  if (offsets.empty()) return;
  if (offsets.front() != 0 || offsets.back() != static_cast<std::int64_t>(num_keys)) {
    fail(must("offsets", "run from 0 to the number of keys, " + std::to_string(num_keys),
              std::to_string(offsets.front()) + " to " + std::to_string(offsets.back())) +
         "; pass B + 1 of them");
  }
  if (!std::is_sorted(offsets.begin(), offsets.end())) fail(must_not_descend("offsets", offsets));
}

}  // namespace recsdk::internal
