#include "util/apart.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

namespace recsdk::internal {
namespace {

// An array, and what it is sorted by: arrays themselves are larger.
struct Place {
  std::uintptr_t at;
  const CallArray* array;
};
using Places = std::span<Place>;

// ---- arrays that lie between one another --------------------------------------------------------

// Columns of rows, in memory seen as rows of equal size.
struct Cells {
  std::uintptr_t column;
  std::uintptr_t column_end;
  std::uintptr_t row;
  std::uintptr_t row_last;
  const CallArray* array;
};

// The cells of an array of one stretch, or of one whose step is the size of a row.
void add_cells(const CallArray& array, std::uintptr_t base, std::uintptr_t row_size,
               std::vector<Cells>& cells) {
  const std::uintptr_t column = (array.begin - base) % row_size;
  const std::uintptr_t row = (array.begin - base) / row_size;
  const std::uintptr_t further = array.num_stretches() - 1;
  const std::uintptr_t end = column + array.bytes;
  cells.push_back({column, std::min(end, row_size), row, row + further, &array});
  if (end <= row_size) return;
  const std::uintptr_t whole = end / row_size - 1;  // rows, none if there are several stretches
  if (whole > 0) cells.push_back({0, row_size, row + 1, row + whole + further, &array});
  if (end % row_size > 0)
    cells.push_back({0, end % row_size, row + whole + 1, row + whole + 1 + further, &array});
}

// Goes through the columns from left to right. Cells that have the same column, and lie apart so
// far, are sorted by their rows.
std::optional<Overlap> find_in_cells(std::span<const Cells> cells) {
  using Bound = std::tuple<std::uintptr_t, bool, const Cells*>;  // a column, whether one begins
  std::vector<Bound> bounds;
  bounds.reserve(2 * cells.size());
  for (const Cells& each : cells) {
    bounds.emplace_back(each.column, true, &each);
    bounds.emplace_back(each.column_end, false, &each);
  }
  std::ranges::sort(bounds);
  std::map<std::uintptr_t, const Cells*> here;  // by their first rows
  for (const auto& [column, begins, each] : bounds) {
    if (!begins) {
      here.erase(each->row);
      continue;
    }
    const auto behind = here.upper_bound(each->row_last);
    if (behind != here.begin()) {
      const Cells& before = *std::prev(behind)->second;
      if (before.row_last >= each->row) return Overlap{*before.array, *each->array};
    }
    here.emplace_hint(behind, each->row, each);
  }
  return std::nullopt;
}

std::optional<Overlap> find_in_pairs(Places some, Places others) {
  for (const Place& one : some) {
    for (const Place& other : others) {
      if (one.array->lies_over(*other.array)) return Overlap{*one.array, *other.array};
    }
  }
  return std::nullopt;
}

// Of arrays between whose first and last bytes others lie. Those of one stretch are seen as cells
// beside those of each step.
std::optional<Overlap> find_among(Places arrays) {
  const std::uintptr_t base = arrays.front().array->begin;
  std::vector<Place> by_step(arrays.begin(), arrays.end());
  for (Place& each : by_step) each.at = each.array->step;
  std::ranges::stable_sort(by_step, {}, &Place::at);
  const auto alone = std::ranges::lower_bound(by_step, CallArray::kAlone, {}, &Place::at);
  std::vector<Cells> cells;
  auto first = by_step.begin();
  do {
    const std::uintptr_t step = first->at;
    const auto last = std::ranges::upper_bound(first, alone, step, {}, &Place::at);
    cells.clear();
    for (const Place& each : std::span(first, last)) add_cells(*each.array, base, step, cells);
    for (const Place& each : std::span(alone, by_step.end()))
      add_cells(*each.array, base, step, cells);
    if (auto found = find_in_cells(cells)) return found;
    if (auto found = find_in_pairs({first, last}, {last, alone})) return found;
    first = last;
  } while (first != alone);
  return std::nullopt;
}

// ---- all arrays ---------------------------------------------------------------------------------

// `written` by where they begin.
std::optional<Overlap> find_twice_written(Places written) {
  for (auto first = written.begin(); first != written.end();) {
    std::uintptr_t end = first->array->end;
    auto last = first + 1;
    for (; last != written.end() && last->at < end; ++last) end = std::max(end, last->array->end);
    if (last - first > 1) {
      if (auto found = find_among({first, last})) return found;
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

std::optional<Overlap> find_overlap(std::span<const CallArray> written,
                                    std::span<const CallArray> read) {
  std::vector<Place> places;
  places.reserve(written.size());
  for (const CallArray& each : written) {
    if (!each.is_empty()) places.push_back({each.begin, &each});
  }
  std::ranges::sort(places, {}, &Place::at);
  if (auto found = find_twice_written(places)) return found;
  std::uintptr_t reach = 0;  // of those so far
  for (Place& each : places) each.at = reach = std::max(reach, each.array->end);
  for (const CallArray& each : read) {
    if (each.is_empty()) continue;
    auto over = std::ranges::upper_bound(places, each.begin, {}, &Place::at);
    for (; over != places.end() && over->array->begin < each.end; ++over) {
      if (over->array->lies_over(each)) return Overlap{*over->array, each};
    }
  }
  return std::nullopt;
}

// ---- arrays that come as they lie ---------------------------------------------------------------

ArrayRuns::Run* ArrayRuns::find(const char* name, bool is_written) {
  for (std::size_t i = num_runs_; i > 0; --i) {
    Run& run = runs_[i - 1];
    if (run.name == name && run.is_written == is_written) return &run;
  }
  return nullptr;
}

void ArrayRuns::begin_run(const CallArray& array, bool is_written) {
  are_too_many_ = num_runs_ == kMostRuns;
  if (are_too_many_) return;
  const std::uintptr_t columns_end = array.begin + array.bytes;
  runs_[num_runs_++] = {array.name,
                        is_written,
                        array.begin,
                        array.end,
                        array.step,
                        columns_end,
                        array.begin + array.step};
}

void ArrayRuns::add_written(const CallArray& array) {
  if (are_too_many_ || array.is_empty()) return;
  Run* const run = find(array.name, true);
  if (run == nullptr) return begin_run(array, true);
  const std::uintptr_t columns_end = array.begin + array.bytes;
  if (array.begin >= run->end) {
    run->step = array.step;
    run->columns_last = array.begin + array.step;
  } else if (array.step != run->step || array.begin < run->columns_end ||
             columns_end > run->columns_last) {
    return begin_run(array, true);
  }
  run->columns_end = columns_end;
  run->end = std::max(run->end, array.end);
}

void ArrayRuns::add_read(const CallArray& array) {
  if (are_too_many_ || array.is_empty()) return;
  Run* const run = find(array.name, false);
  if (run == nullptr) return begin_run(array, false);
  run->begin = std::min(run->begin, array.begin);
  run->end = std::max(run->end, array.end);
}

bool ArrayRuns::are_apart() const {
  if (are_too_many_) return false;
  for (std::size_t i = 0; i < num_runs_; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Run& one = runs_[i];
      const Run& other = runs_[j];
      if ((one.is_written || other.is_written) && one.begin < other.end && other.begin < one.end)
        return false;
    }
  }
  return true;
}

}  // namespace recsdk::internal
