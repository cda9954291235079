// index.h: Index, IndexCut, Lease.
#include "recsdk/index.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "arguments/busy.h"
#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/refusals.h"
#include "bindings.h"
#include "index_calls.h"
#include "recsdk/key_metadata.h"

namespace recsdk::bind {

std::optional<Result> make_outcomes_if(nb::handle return_outcomes, const Keys& keys) {
  if (!flag(return_outcomes, "return_outcomes")) return std::nullopt;
  return make_outcomes(keys.framework(), static_cast<std::int64_t>(keys.size()));
}

nb::object outcomes_or_none(std::optional<Result> outcomes) {
  return outcomes ? std::move(outcomes->object) : nb::none();
}

std::span<Outcome> span_of(const std::optional<Result>& outcomes, std::size_t n) {
  return outcomes ? outcome_span(*outcomes, n) : std::span<Outcome>();
}

PyKeyData::PyKeyData(nb::handle times, nb::handle scores, nb::handle counts, nb::handle clicks,
                     nb::handle now) {
  if (!now.is_none()) data_.now = integer(now, "now");
  const auto take = [](nb::handle given, const char* name, std::optional<Integers>& own) {
    if (given.is_none()) return std::span<const std::int64_t>();
    own.emplace(given, name);
    return std::span<const std::int64_t>(own->span());
  };
  data_.counts = take(counts, "counts", counts_);
  data_.clicks = take(clicks, "clicks", clicks_);
  data_.times = take(times, "times", times_);
  if (scores.is_none()) return;
  scores_ = floats(scores, "scores");
  data_.scores = {float_data(scores_), static_cast<std::size_t>(scores_.shape[0])};
}

nb::tuple map(Index& index, nb::handle keys_object, nb::handle insert, nb::handle lease,
              const KeyData& data, bool admits_all) {
  const Keys keys(keys_object);
  const MapOptions options{flag(insert, "insert"), lease_of(lease), data, admits_all};
  const auto n = static_cast<std::int64_t>(keys.size());
  Result rows = make_rows(keys.framework(), n);
  Result outcomes = make_outcomes(keys.framework(), n);
  {
    const WithoutGil without_gil;
    index.map(keys.span(), row_span(rows, keys.size()), outcome_span(outcomes, keys.size()),
              options);
  }
  return nb::make_tuple(std::move(rows.object), std::move(outcomes.object));
}

nb::object erase(Index& index, nb::handle keys_object, nb::handle return_outcomes) {
  const Keys keys(keys_object);
  std::optional<Result> kinds = make_outcomes_if(return_outcomes, keys);
  {
    const WithoutGil without_gil;
    index.erase(keys.span(), span_of(kinds, keys.size()));
  }
  return outcomes_or_none(std::move(kinds));
}

std::optional<GroupRange> group_range(
    const std::optional<std::pair<std::int64_t, std::int64_t>>& given) {
  if (!given) return std::nullopt;
  return GroupRange{given->first, given->second};
}

std::vector<AdmitRecord> joined_records(nb::handle keys_object, nb::handle counts_object,
                                        nb::handle steps_object, nb::handle clicks_object) {
  const Keys keys(keys_object);
  const Integers counts(counts_object, "counts");
  const Integers steps(steps_object, "steps");
  std::optional<Integers> clicks;
  if (!clicks_object.is_none()) clicks.emplace(clicks_object, "clicks");
  require_size("counts", "key", keys.size(), counts.span().size());
  require_size("steps", "key", keys.size(), steps.span().size());
  if (clicks) require_size("clicks", "key", keys.size(), clicks->span().size());
  std::vector<AdmitRecord> records(keys.size());
  for (std::size_t i = 0; i < records.size(); ++i)
    records[i] = {keys.span()[i], counts.span()[i], steps.span()[i],
                  clicks ? clicks->span()[i] : 0};
  return records;
}

nb::tuple tuple_of_records(std::span<const AdmitRecord> records) {
  const auto n = static_cast<std::int64_t>(records.size());
  Result keys = make_rows(Framework::kNumpy, n);
  Result counts = make_rows(Framework::kNumpy, n);
  Result steps = make_rows(Framework::kNumpy, n);
  Result clicks = make_rows(Framework::kNumpy, n);
  for (std::size_t i = 0; i < records.size(); ++i) {
    static_cast<std::int64_t*>(keys.data)[i] = records[i].key;
    static_cast<std::int64_t*>(counts.data)[i] = records[i].count;
    static_cast<std::int64_t*>(steps.data)[i] = records[i].step;
    static_cast<std::int64_t*>(clicks.data)[i] = records[i].clicks;
  }
  return nb::make_tuple(std::move(keys.object), std::move(counts.object), std::move(steps.object),
                        std::move(clicks.object));
}

nb::tuple tuple_of_shared(const SharedRows& rows, const RowLayout& layout) {
  const auto n = static_cast<std::int64_t>(rows.keys.size());
  Result keys = make_rows(Framework::kNumpy, n);
  Result weights = make_floats(Framework::kNumpy, n, layout.dim);
  Result state = make_floats(Framework::kNumpy, n, layout.state_width());
  std::copy(rows.keys.begin(), rows.keys.end(), static_cast<Key*>(keys.data));
  std::copy(rows.weights.begin(), rows.weights.end(), static_cast<float*>(weights.data));
  std::copy(rows.state.begin(), rows.state.end(), static_cast<float*>(state.data));
  return nb::make_tuple(std::move(keys.object), std::move(weights.object), std::move(state.object));
}

nb::dict stats_of(const IndexStats& found) {
  nb::dict made;
  nb::list outcomes;
  for (const std::uint64_t count : found.outcomes) outcomes.append(count);
  made["num_rows"] = found.num_rows;
  made["num_rows_in_flight"] = found.num_rows_in_flight;
  made["num_rows_held_back"] = found.num_rows_held_back;
  made["outcomes"] = outcomes;
  made["erased"] = found.erased;
  made["evicted"] = found.evicted;
  made["expired"] = found.expired;
  made["returned"] = found.returned;
  made["churn_lost"] = found.churn_lost;
  made["admission_records"] = found.admission_records;
  made["records_lost"] = found.records_lost;
  made["index_bytes"] = found.index_bytes;
  made["metadata_bytes"] = found.metadata_bytes;
  made["tracking_bytes"] = found.tracking_bytes;
  made["index_slots"] = found.index_slots;
  made["index_segments"] = found.index_segments;
  made["index_directory"] = found.index_directory;
  made["index_splits"] = found.index_splits;
  made["index_overflowed"] = found.index_overflowed;
  made["index_crowded"] = found.index_crowded;
  made["index_probes"] = found.index_probes;
  made["index_dense_keys"] = found.index_dense_keys;
  made["index_dense_pages"] = found.index_dense_pages;
  return made;
}

namespace {

nb::object copy_of(std::span<const std::int64_t> values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Result made = make_rows(Framework::kNumpy, n);
  if (!values.empty()) std::memcpy(made.data, values.data(), values.size_bytes());
  return std::move(made.object);
}

nb::dict stats(PyIndex& index) {
  IndexStats found;
  {
    const WithoutGil without_gil;
    found = index->stats();
  }
  return stats_of(found);
}

/// (keys (n,), rows (n,)) of up to `capacity` visible keys, and where to go on.
nb::tuple export_keys(PyIndex& index, RowNumber begin, std::int64_t capacity) {
  Result keys = make_rows(Framework::kNumpy, capacity);
  Result rows = make_rows(Framework::kNumpy, capacity);
  const auto size = static_cast<std::size_t>(capacity);
  std::int64_t n = 0;
  {
    const WithoutGil without_gil;
    n = index->export_keys(begin, row_span(keys, size), row_span(rows, size));
  }
  const nb::slice part(nb::int_(0), nb::int_(n), nb::none());
  return nb::make_tuple(begin, keys.object[part], rows.object[part]);
}

/// Without `state` as by Index::assign. With it `words` (n * W,) are what eviction keeps of the
/// keys, and records (m,) each what admission counted of others.
void assign(PyIndex& index, nb::handle keys_object, nb::handle words_object,
            const std::optional<EvictionState>& state, nb::handle record_keys_object,
            nb::handle counts_object, nb::handle steps_object, nb::handle clicks_object) {
  const Keys keys(keys_object);
  if (!state) {
    const WithoutGil without_gil;
    return index->assign(keys.span());
  }
  const Integers words(words_object, "metadata");
  const std::vector<AdmitRecord> records =
      joined_records(record_keys_object, counts_object, steps_object, clicks_object);
  const WithoutGil without_gil;
  assign_with_metadata(*index, keys.span(), words.span(), *state, records);
}

/// Keys, counts, steps and clicks (m,) each.
nb::tuple records(PyIndex& index) {
  std::vector<AdmitRecord> found;
  {
    const WithoutGil without_gil;
    found = admission_records(*index);
  }
  return tuple_of_records(found);
}

/// (n * W,) of rows (n,).
nb::object metadata(PyIndex& index, nb::handle rows_object) {
  const Integers rows(rows_object, "rows");
  const std::size_t size = rows.span().size() * metadata_fields(*index).size();
  Result words = make_rows(Framework::kNumpy, static_cast<std::int64_t>(size));
  {
    const WithoutGil without_gil;
    copy_metadata(*index, rows.span(), {static_cast<std::int64_t*>(words.data), size});
  }
  return std::move(words.object);
}

nb::list metadata_names(PyIndex& index) { return metadata_names_of(*index); }

void note_changed(PyIndex& index, nb::handle rows_object) {
  const Integers rows(rows_object, "rows");
  const WithoutGil without_gil;
  index->note_changed(rows.span());
}

void make_index(PyIndex* place, std::string name, std::optional<std::uint64_t> hash_seed,
                std::optional<std::int64_t> max_rows, std::optional<std::int64_t> eviction_groups,
                const std::optional<std::pair<std::int64_t, std::int64_t>>& owned_groups,
                OnFull on_full, nb::object make_rows_function, std::optional<int> num_threads,
                const std::optional<EvictConfig>& eviction, std::optional<AdmitConfig> admission,
                std::uint64_t seed, const DefaultConfig& default_row,
                std::optional<std::int64_t> record_groups) {
  if (admission) admission->salt = admission_salt(seed, name);
  std::shared_ptr<PythonMaker> maker;
  if (!make_rows_function.is_none())
    maker = std::make_shared<PythonMaker>(std::move(make_rows_function));
  new (place)
      PyIndex({std::move(name), hash_seed, max_rows, eviction_groups, group_range(owned_groups),
               on_full, num_threads, eviction, std::move(admission), record_groups, default_row},
              std::move(maker));
}

void bind_lease(nb::module_& module) {
  nb::class_<PyLease>(module, "Lease", nb::is_weak_referenceable(),
                      "A batch in flight, see Table.lease: its rows are given to no other key.")
      .def("release", &PyLease::release)
      .def_prop_ro("step", [](const PyLease& lease) { return lease.get().step(); })
      .def_prop_ro("is_released", [](const PyLease& lease) { return lease.get().is_released(); })
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PyLease& lease, const nb::args&) { lease.release(); });
}

void bind_cut(nb::module_& module) {
  nb::class_<PyIndexCut>(module, "IndexCut", nb::is_weak_referenceable(),
                         "The keys of an index at one moment, or what changed, see Index.cut.")
      .def_prop_ro("changes_only", [](PyIndexCut& cut) { return cut->changes_only(); })
      .def_prop_ro("keys", [](PyIndexCut& cut) { return copy_of(cut->keys()); })
      .def_prop_ro("rows", [](PyIndexCut& cut) { return copy_of(cut->rows()); })
      .def_prop_ro("left", [](PyIndexCut& cut) { return copy_of(cut->left()); })
      .def_prop_ro("causes",
                   [](PyIndexCut& cut) {
                     const std::span<const LeaveCause> causes = cut->causes();
                     Result made =
                         make_outcomes(Framework::kNumpy, static_cast<std::int64_t>(causes.size()));
                     if (!causes.empty()) std::memcpy(made.data, causes.data(), causes.size());
                     return std::move(made.object);
                   })
      .def(
          "finish",
          [](PyIndexCut& cut, nb::handle durable) { cut.finish(flag(durable, "durable")); },
          nb::arg("durable").none())
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PyIndexCut& cut, const nb::args&) { cut.finish(false); });
}

}  // namespace

nb::list metadata_names_of(const Index& index) {
  nb::list names;
  for (const FileField& field : metadata_fields(index)) names.append(field.name);
  return names;
}

nb::dict standing(const Index& index, std::uint64_t key) {
  KeyStanding found;
  {
    const WithoutGil without_gil;
    found = standing_of(index, static_cast<Key>(key));
  }
  nb::dict made;
  made["row"] = found.row;
  made["words"] = copy_of(found.words);
  made["seen"] = found.seen;
  made["step"] = found.step;
  made["group"] = found.group;
  made["group_rows"] = found.group_rows;
  made["group_quota"] = found.group_quota;
  made["num_before"] = found.num_before;
  made["has_expired"] = found.has_expired;
  return made;
}

std::int64_t evict_where(Index& index, const nb::callable& function, bool is_dry) {
  const auto choose = [&](const KeptKeys& kept, std::span<std::uint8_t> leaves) {
    const WithGil gil;
    const nb::object words = copy_of(kept.words);
    const Result chosen =
        make_outcomes(Framework::kNumpy, static_cast<std::int64_t>(leaves.size()));
    std::memset(chosen.data, 0, leaves.size());
    call_python(function, kept.step, words, chosen.object);
    std::memcpy(leaves.data(), chosen.data, leaves.size());
  };
  const WithoutGil without_gil;
  return is_dry ? would_evict_where(index, choose) : evict_where(index, choose);
}

PythonMaker::PythonMaker(nb::object python_function)
    : function_(new nb::object(std::move(python_function)), release_python),
      has_norms_(nb::hasattr(*function_, "norms")),
      checks_(nb::hasattr(*function_, "check")) {}

void PythonMaker::check(std::span<const Key> keys) {
  const WithGil gil;
  const auto n = static_cast<std::int64_t>(keys.size());
  const Result given = bind::make_rows(Framework::kNumpy, n);
  std::copy(keys.begin(), keys.end(), static_cast<Key*>(given.data));
  call_python(function_->attr("check"), given.object);
}

void PythonMaker::make(const NewRows& added) {
  const WithGil gil;
  const Result keys = bind::make_rows(Framework::kNumpy, added.size());
  const Result rows = bind::make_rows(Framework::kNumpy, added.size());
  added.copy_keys(0, row_span(keys, added.rows().size()));
  std::copy(added.rows().begin(), added.rows().end(), static_cast<RowNumber*>(rows.data));
  call_python(*function_, keys.object, rows.object);
}

void PythonMaker::norms(std::span<const std::uint32_t> rows, std::span<float> found) const {
  const WithGil gil;
  const auto n = static_cast<std::int64_t>(rows.size());
  const Result numbers = bind::make_rows(Framework::kNumpy, n);
  std::copy(rows.begin(), rows.end(), static_cast<RowNumber*>(numbers.data));
  const nb::object given = call_python(function_->attr("norms"), numbers.object);
  const Array norms = floats(given, "norms", n);
  std::copy_n(float_data(norms), n, found.data());
}

void bind_index(nb::module_& module) {
  bind_lease(module);
  bind_cut(module);
  nb::enum_<OnFull>(module, "OnFull")
      .value("REFUSE", OnFull::kRefuse)
      .value("RAISE", OnFull::kRaise);
  const nb::call_guard<WithoutGil> without_gil;
  nb::class_<PyIndex>(module, "Index", nb::type_slots(FunctionSlots<PyIndex>::slots))
      .def("__init__", &make_index, nb::arg("name"), nb::arg("hash_seed").none(),
           nb::arg("max_rows").none(), nb::arg("eviction_groups").none(),
           nb::arg("owned_groups").none(), nb::arg("on_full"), nb::arg("make_rows").none(),
           nb::arg("num_threads").none(), nb::arg("eviction").none(), nb::arg("admission").none(),
           nb::arg("seed"), nb::arg("default_row"), nb::arg("record_groups").none())
      .def(
          "lease",
          [](PyIndex& index, std::optional<std::int64_t> step) {
            return PyLease(index->lease(step));
          },
          nb::arg("step").none(), without_gil)
      .def("map",
           dropping_abandoned(+[](PyIndex& index, nb::handle keys, nb::handle insert,
                                  nb::handle lease, nb::handle times, nb::handle scores,
                                  nb::handle counts, nb::handle clicks, nb::handle now,
                                  nb::handle admits_all) {
             const PyKeyData data(times, scores, counts, clicks, now);
             return map(*index, keys, insert, lease, data.get(), flag(admits_all, "admits_all"));
           }),
           nb::arg("keys").none(), nb::arg("insert").none(), nb::arg("lease").none(),
           nb::arg("times").none(), nb::arg("scores").none(), nb::arg("counts").none(),
           nb::arg("clicks").none(), nb::arg("now").none(), nb::arg("admits_all").none())
      .def("erase", dropping_abandoned(+[](PyIndex& index, nb::handle keys, nb::handle outcomes) {
             return erase(*index, keys, outcomes);
           }),
           nb::arg("keys").none(), nb::arg("return_outcomes").none())
      .def("clear", dropping_abandoned(+[](PyIndex& index) { index->clear(); }), without_gil)
      .def("assign", dropping_abandoned(&assign), nb::arg("keys").none(), nb::arg("words").none(),
           nb::arg("state").none(), nb::arg("record_keys").none(), nb::arg("counts").none(),
           nb::arg("steps").none(), nb::arg("clicks").none())
      .def("records", &records)
      .def("evict", dropping_abandoned(+[](PyIndex& index, std::int64_t max_rows) {
             return index->evict(max_rows);
           }),
           nb::arg("max_rows"), without_gil)
      .def(
          "would_evict",
          [](PyIndex& index, std::int64_t max_rows) { return would_evict(*index, max_rows); },
          nb::arg("max_rows"), without_gil)
      .def("expire", dropping_abandoned(+[](PyIndex& index) { return index->expire(); }),
           without_gil)
      .def("leavers",
           dropping_abandoned(+[](PyIndex& index, std::int64_t max_rows, OnOverflow on_overflow,
                                  double block_seconds) {
             return PyLeavers(index->leavers({max_rows, on_overflow, block_seconds}), 0, 0);
           }),
           nb::arg("max_rows"), nb::arg("on_overflow"), nb::arg("block_seconds"), without_gil)
      .def(
          "would_expire", [](PyIndex& index) { return would_expire(*index); }, without_gil)
      .def(
          "steps_to_look",
          [](PyIndex& index, std::int64_t step) { return steps_to_look(*index, step); },
          nb::arg("step"), without_gil)
      .def(
          "decided",
          [](PyIndex& index) {
            const Decided found = decided(*index);
            return std::pair(found.num_keys, found.step);
          },
          without_gil)
      .def(
          "standing", [](PyIndex& index, std::uint64_t key) { return standing(*index, key); },
          nb::arg("key"))
      .def("evict_where",
           dropping_abandoned(+[](PyIndex& index, const nb::callable& choose, bool is_dry) {
             return evict_where(*index, choose, is_dry);
           }),
           nb::arg("choose"), nb::arg("is_dry"))
      .def(
          "set_time", [](PyIndex& index, std::int64_t time) { index->set_time(time); },
          nb::arg("time"), without_gil)
      .def(
          "time", [](PyIndex& index) { return index->time(); }, without_gil)
      .def("metadata", &metadata, nb::arg("rows").none())
      .def("metadata_names", &metadata_names)
      .def(
          "eviction_state", [](PyIndex& index) { return eviction_state(*index); }, without_gil)
      .def("check_idle", dropping_abandoned(+[](PyIndex& index) { index->check_idle(); }),
           without_gil)
      .def(
          "cut", [](PyIndex& index, bool only) { return PyIndexCut(index->cut(only)); },
          nb::arg("changes_only"), without_gil)
      .def(
          "is_tracking", [](PyIndex& index) { return index->is_tracking(); }, without_gil)
      .def("note_changed", &note_changed, nb::arg("rows").none())
      .def("end_row", [](PyIndex& index) { return index->end_row(); })
      .def("export_keys", &export_keys, nb::arg("begin"), nb::arg("capacity"))
      .def(
          "size", [](PyIndex& index) { return index->size(); }, without_gil)
      .def("stats", &stats)
      .def(
          "reserve", [](PyIndex& index, std::int64_t num_rows) { index->reserve(num_rows); },
          nb::arg("num_rows"), without_gil)
      .def("check_invariants", [](PyIndex& index) { index->check_invariants(); }, without_gil);
}

}  // namespace recsdk::bind
