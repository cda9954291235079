// How a device adds up the gradients of equal rows: as steps of whole matrices, which give the same
// bits in whatever order the device works.
//
// The gradients of a row lie side by side, as a run. Neighbours are added first, then neighbours of
// those sums, and so on: as many steps as the logarithm of the longest run.
#pragma once

#include <cstdint>
#include <vector>

#include "bags/gradients.h"

namespace recsdk::internal {

/// One step: from a matrix of vectors to a shorter one,
/// out[i] = in[left[i]] + (i < right.size() ? in[right[i]] : 0).
struct SumStep {
  std::vector<std::int64_t> left;
  std::vector<std::int64_t> right;
};

/// From the gradients of keys to one gradient a row.
struct RunSum {
  std::vector<std::int64_t> rows;   ///< distinct; the order of the result
  std::vector<std::int64_t> order;  ///< which key's gradient stands where at first
  std::vector<SumStep> steps;
};

/// Cost: linear in the number of items.
RunSum plan_run_sum(const SortedGradients& gradients);

}  // namespace recsdk::internal
