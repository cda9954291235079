#include "bags/segment_sum.h"

#include <cstddef>
#include <utility>

namespace recsdk::internal {
namespace {

// The places of each segment's vectors, one segment after the other.
struct Segments {
  std::vector<std::int64_t> places;
  std::vector<std::int64_t> begins;  // one more than there are segments

  std::int64_t count() const { return static_cast<std::int64_t>(begins.size()) - 1; }
  std::int64_t begin(std::int64_t s) const { return begins[static_cast<std::size_t>(s)]; }
  std::int64_t place(std::int64_t i) const { return places[static_cast<std::size_t>(i)]; }
};

// Sums of two come first in what a step gives, so that they are added as one matrix.
Segments halve(const Segments& segments, SumStep& step) {
  std::int64_t num_pairs = 0;
  for (std::int64_t s = 0; s < segments.count(); ++s)
    num_pairs += (segments.begin(s + 1) - segments.begin(s)) / 2;
  Segments next;
  next.begins.push_back(0);
  step.right.reserve(static_cast<std::size_t>(num_pairs));
  std::vector<std::int64_t> singles;
  for (std::int64_t s = 0; s < segments.count(); ++s) {
    std::int64_t i = segments.begin(s);
    for (; i + 1 < segments.begin(s + 1); i += 2) {
      next.places.push_back(static_cast<std::int64_t>(step.right.size()));
      step.left.push_back(segments.place(i));
      step.right.push_back(segments.place(i + 1));
    }
    if (i < segments.begin(s + 1)) {
      next.places.push_back(num_pairs + static_cast<std::int64_t>(singles.size()));
      singles.push_back(segments.place(i));
    }
    next.begins.push_back(static_cast<std::int64_t>(next.places.size()));
  }
  step.left.insert(step.left.end(), singles.begin(), singles.end());
  return next;
}

}  // namespace

SegmentSum plan_segment_sum(const SortedGradients& gradients) {
  SegmentSum sum;
  Segments segments;
  std::vector<std::int64_t> rows;
  const std::int64_t num_items = gradients.items.size();
  sum.order.reserve(static_cast<std::size_t>(num_items));
  for (std::int64_t i = 0; i < num_items; ++i) {
    const GradItem& item = gradients.items[i];
    if (i == 0 || item.row != gradients.items[i - 1].row) {
      rows.push_back(item.row);
      segments.begins.push_back(i);
    }
    sum.order.push_back(item.source);
    segments.places.push_back(i);
  }
  segments.begins.push_back(num_items);
  while (segments.places.size() > rows.size()) {
    SumStep step;
    segments = halve(segments, step);
    sum.steps.push_back(std::move(step));
  }
  sum.rows.resize(rows.size());
  for (std::size_t s = 0; s < rows.size(); ++s)
    sum.rows[static_cast<std::size_t>(segments.places[s])] = rows[s];
  return sum;
}

}  // namespace recsdk::internal
