// Failing the n-th allocation, whether by operator new or of pages. allocation_failure_test.cc
// replaces operator new.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <stdexcept>
#include <vector>

#include "recsdk/table.h"

namespace recsdk::test {

/// Allocations until one fails; negative: none will.
inline std::atomic<std::int64_t> allocations_left{-1};

/// Counts an allocation; true if it shall fail. Only one fails, those after it succeed.
inline bool allocation_fails() {
  std::int64_t left = allocations_left.load();
  while (left >= 0 && !allocations_left.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

inline void fail_pages(std::size_t) {
  if (allocation_fails()) throw Error(ErrorCode::kOutOfMemory, "pages, as the test wants it");
}

enum class Ending { kUndisturbed, kSurvived, kOutOfMemory };

/// Runs call() with its n-th allocation failing. kUndisturbed: it makes no more than n.
template <typename Call>
Ending run_failing(std::int64_t n, const Call& call) {
  Ending ending = Ending::kSurvived;
  allocations_left.store(n);
  try {
    call();
  } catch (const std::bad_alloc&) {
    ending = Ending::kOutOfMemory;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    ending = Ending::kOutOfMemory;
  }
  const bool was_reached = allocations_left.exchange(-1) < 0;
  return was_reached ? ending : Ending::kUndisturbed;
}

/// Everything that a failed call must leave as it was.
struct Snapshot {
  explicit Snapshot(const Table& table) {
    const TableStats stats = table.stats();
    counters.assign(std::begin(stats.outcomes), std::end(stats.outcomes));
    counters.insert(counters.end(), {static_cast<std::uint64_t>(stats.num_rows),
                                     static_cast<std::uint64_t>(stats.num_rows_in_flight),
                                     static_cast<std::uint64_t>(stats.admission_records),
                                     stats.records_lost, stats.returned, stats.churn_lost,
                                     stats.erased, stats.updates, stats.nonfinite});
    std::vector<float> weights(static_cast<std::size_t>(table.config().dim));
    std::vector<float> state(static_cast<std::size_t>(table.layout().state_width()));
    Key key = 0;
    const ExportBuffer one{
        .capacity = 1, .keys = &key, .weights = weights.data(), .state = state.data()};
    for (RowNumber begin = 0; table.export_rows(begin, one) == 1;) {
      keys.push_back(key);
      rows.push_back(begin - 1);  // where the export goes on
      values.insert(values.end(), weights.begin(), weights.end());
      values.insert(values.end(), state.begin(), state.end());
    }
    const SharedRows shared = table.shared_rows();
    values.insert(values.end(), shared.weights.begin(), shared.weights.end());
    values.insert(values.end(), shared.state.begin(), shared.state.end());
  }

  bool operator==(const Snapshot&) const = default;
  bool has_rows_of(const Snapshot& other) const {
    return keys == other.keys && rows == other.rows && values == other.values;
  }

  std::vector<std::uint64_t> counters;
  std::vector<Key> keys;
  std::vector<RowNumber> rows;
  std::vector<float> values;
};

}  // namespace recsdk::test
