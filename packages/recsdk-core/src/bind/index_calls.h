// Calls that an index and a table have alike.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "arguments/array.h"
#include "arguments/checked.h"
#include "arguments/handles.h"
#include "arguments/results.h"
#include "recsdk/index.h"
#include "recsdk/table.h"

namespace recsdk::bind {

/// `return_outcomes` is a flag.
std::optional<Result> make_outcomes_if(nb::handle return_outcomes, const Keys& keys);
nb::object outcomes_or_none(std::optional<Result> outcomes);
std::span<Outcome> span_of(const std::optional<Result>& outcomes, std::size_t n);

/// What comes with keys for eviction and admission: arrays or None each; `now` an int or None.
class PyKeyData {
 public:
  PyKeyData(nb::handle times, nb::handle scores, nb::handle counts, nb::handle clicks,
            nb::handle now);
  const KeyData& get() const { return data_; }

 private:
  std::optional<Integers> times_;
  std::optional<Integers> counts_;
  std::optional<Integers> clicks_;
  Array scores_;
  KeyData data_;
};

/// (rows, outcomes)
nb::tuple map(Index& index, nb::handle keys, nb::handle insert, nb::handle lease,
              const KeyData& data, bool admits_all = false);
/// How often keys without a row were seen, and clicked: (n,) each, clicks or None. ValueError for
/// other lengths.
std::vector<AdmitRecord> joined_records(nb::handle keys, nb::handle counts, nb::handle steps,
                                        nb::handle clicks);
/// (keys, counts, steps, clicks), int64 (n,) each.
nb::tuple tuple_of_records(std::span<const AdmitRecord> records);
/// Keys (n,), weights (n, D), state (n, S) of rows that keys without one share.
nb::tuple tuple_of_shared(const SharedRows& rows, const RowLayout& layout);
/// Outcomes, or None.
nb::object erase(Index& index, nb::handle keys, nb::handle return_outcomes);
/// Groups of keys from (begin, end).
std::optional<GroupRange> group_range(
    const std::optional<std::pair<std::int64_t, std::int64_t>>& given);
/// The names of what eviction keeps of a key, in the order of its words; none without eviction.
nb::list metadata_names_of(const Index& index);
/// evict_where or would_evict_where: function(step, words (n * W,), leaves uint8 (n,)) fills
/// leaves.
std::int64_t evict_where(Index& index, const nb::callable& function, bool is_dry);
/// standing_of, by name.
nb::dict standing(const Index& index, std::uint64_t key);
/// What an index tells, by name.
nb::dict stats_of(const IndexStats& stats);

}  // namespace recsdk::bind
