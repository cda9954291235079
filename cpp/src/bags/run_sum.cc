#include "bags/run_sum.h"

#include <cstddef>
#include <utility>

namespace recsdk::internal {
namespace {

// The positions of each run's vectors, one run after the other.
struct Runs {
  std::vector<std::int64_t> places;
  std::vector<std::int64_t> begins;  // one more than there are runs

  std::int64_t count() const { return static_cast<std::int64_t>(begins.size()) - 1; }
  std::int64_t begin(std::int64_t r) const { return begins[static_cast<std::size_t>(r)]; }
  std::int64_t place(std::int64_t i) const { return places[static_cast<std::size_t>(i)]; }
};

// Sums of two come first in what a step gives, so that they are added as one matrix.
Runs halve(const Runs& runs, SumStep& step) {
  std::int64_t num_pairs = 0;
  for (std::int64_t r = 0; r < runs.count(); ++r)
    num_pairs += (runs.begin(r + 1) - runs.begin(r)) / 2;
  Runs next;
  next.begins.push_back(0);
  step.right.reserve(static_cast<std::size_t>(num_pairs));
  std::vector<std::int64_t> singles;
  for (std::int64_t r = 0; r < runs.count(); ++r) {
    std::int64_t i = runs.begin(r);
    for (; i + 1 < runs.begin(r + 1); i += 2) {
      next.places.push_back(static_cast<std::int64_t>(step.right.size()));
      step.left.push_back(runs.place(i));
      step.right.push_back(runs.place(i + 1));
    }
    if (i < runs.begin(r + 1)) {
      next.places.push_back(num_pairs + static_cast<std::int64_t>(singles.size()));
      singles.push_back(runs.place(i));
    }
    next.begins.push_back(static_cast<std::int64_t>(next.places.size()));
  }
  step.left.insert(step.left.end(), singles.begin(), singles.end());
  return next;
}

}  // namespace

RunSum plan_run_sum(const SortedGradients& gradients) {
  RunSum sum;
  Runs runs;
  std::vector<std::int64_t> rows;
  const std::int64_t num_items = gradients.items.size();
  sum.order.reserve(static_cast<std::size_t>(num_items));
  for (std::int64_t i = 0; i < num_items; ++i) {
    const GradItem& item = gradients.items[i];
    if (i == 0 || item.row != gradients.items[i - 1].row) {
      rows.push_back(item.row);
      runs.begins.push_back(i);
    }
    sum.order.push_back(item.source);
    runs.places.push_back(i);
  }
  runs.begins.push_back(num_items);
  while (runs.places.size() > rows.size()) {
    SumStep step;
    runs = halve(runs, step);
    sum.steps.push_back(std::move(step));
  }
  sum.rows.resize(rows.size());
  for (std::size_t r = 0; r < rows.size(); ++r)
    sum.rows[static_cast<std::size_t>(runs.places[r])] = rows[r];
  return sum;
}

}  // namespace recsdk::internal
