#include "util/apart.h"

#include <algorithm>

namespace recsdk::internal {
namespace {

using Arrays = std::span<CallArray>;

// Of arrays with one step, seen as rows of that many bytes: where in its row an array's stretches
// begin, and from which row to which it has some.
struct Rows {
  std::uintptr_t first;
  std::uintptr_t last;

  Rows(const CallArray& array, std::uintptr_t base)
      : first((array.begin - base) / array.step), last(first + array.num_stretches() - 1) {}
  bool meet(const Rows& other, std::uintptr_t further = 0) const {
    return first + further <= other.last && other.first <= last + further;
  }
};

// Two of them that have a byte in common. All have the same step, so two do if they share a column
// of a row.
std::optional<Overlap> find_in_columns(Arrays arrays) {
  const std::uintptr_t base = std::ranges::min(arrays, {}, &CallArray::begin).begin;
  const std::uintptr_t step = arrays.front().step;
  for (CallArray& array : arrays) array.order = (array.begin - base) % step;
  std::ranges::sort(arrays, {}, &CallArray::order);
  for (auto one = arrays.begin(); one != arrays.end(); ++one) {
    const std::uintptr_t column_end = one->order + one->bytes;
    const auto meets = [&](auto from, std::uintptr_t end, std::uintptr_t further) {
      for (; from != arrays.end() && from->order < end; ++from) {
        if (from != one && Rows(*one, base).meet(Rows(*from, base), further)) return from;
      }
      return arrays.end();
    };
    auto other = meets(one + 1, column_end, 0);
    // Its stretches may end in the rows below those in which they begin.
    if (other == arrays.end() && column_end > step)
      other = meets(arrays.begin(), column_end - step, 1);
    if (other != arrays.end()) return Overlap{*one, *other};
  }
  return std::nullopt;
}

// Of arrays between whose first and last bytes others lie.
std::optional<Overlap> find_among(Arrays arrays) {
  std::ranges::sort(arrays, {}, &CallArray::step);
  for (auto first = arrays.begin(); first != arrays.end();) {
    const auto last =
        std::ranges::upper_bound(first, arrays.end(), first->step, {}, &CallArray::step);
    if (auto found = find_in_columns({first, last})) return found;
    for (auto one = first; one != last; ++one) {
      const auto other = std::find_if(last, arrays.end(),
                                      [&](const CallArray& each) { return one->lies_over(each); });
      if (other != arrays.end()) return Overlap{*one, *other};
    }
    first = last;
  }
  return std::nullopt;
}

std::optional<Overlap> find_twice_written(Arrays written) {
  for (auto first = written.begin(); first != written.end();) {
    std::uintptr_t end = first->end;
    auto last = first + 1;
    for (; last != written.end() && last->begin < end; ++last) end = std::max(end, last->end);
    if (last - first > 1) {
      if (auto found = find_among({first, last})) return found;
      std::ranges::sort(first, last, {}, &CallArray::begin);
    }
    first = last;
  }
  return std::nullopt;
}

bool has_byte_of(const CallArray& array, std::uintptr_t begin, std::uintptr_t end) {
  // The first stretch that ends behind where the other begins.
  const std::uintptr_t first_end = array.begin + array.bytes;
  const std::uintptr_t number = begin < first_end ? 0 : (begin - first_end) / array.step + 1;
  return array.begin + number * array.step < std::min(end, array.end);
}

}  // namespace

bool CallArray::lies_over(const CallArray& other) const {
  if (is_empty() || other.is_empty() || begin >= other.end || other.begin >= end) return false;
  const bool is_fewer = num_stretches() < other.num_stretches();
  const CallArray& fewer = is_fewer ? *this : other;
  const CallArray& more = is_fewer ? other : *this;
  for (std::uintptr_t at = fewer.begin; at < fewer.end; at += fewer.step) {
    if (has_byte_of(more, at, at + fewer.bytes)) return true;
  }
  return false;
}

std::optional<Overlap> find_overlap(std::vector<CallArray>& written,
                                    std::span<const CallArray> read) {
  std::erase_if(written, [](const CallArray& each) { return each.is_empty(); });
  std::ranges::sort(written, {}, &CallArray::begin);
  if (auto found = find_twice_written(written)) return found;
  std::uintptr_t reach = 0;  // of those so far
  for (CallArray& each : written) each.order = reach = std::max(reach, each.end);
  for (const CallArray& each : read) {
    if (each.is_empty()) continue;
    auto over = std::ranges::upper_bound(written, each.begin, {}, &CallArray::order);
    for (; over != written.end() && over->begin < each.end; ++over) {
      if (over->lies_over(each)) return Overlap{*over, each};
    }
  }
  return std::nullopt;
}

}  // namespace recsdk::internal
