// checkpoint.h: Cut, write_rows, Restore.
#include "recsdk/checkpoint.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <mutex>
#include <optional>
#include <utility>

#include "arguments/array.h"
#include "arguments/busy.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/row_files.h"
#include "bindings.h"
#include "index_calls.h"

namespace recsdk::bind {
namespace {

/// Lets Python's signal handlers run, then calls the function, if there is one.
void report(nb::handle progress, std::int64_t num_bytes) {
  const WithGil gil;
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  if (!progress.is_none()) call_python(progress, num_bytes);
}

RowFileSummary write_cut(PyCut& cut, nb::handle write, const nb::bytes& token,
                         const std::string& codec, std::int64_t block_bytes, nb::handle progress,
                         const std::string& name, bool in_background, bool sums_content) {
  const PySink sink(write, name);
  WriteOptions options;
  options.token = token_of(token);
  options.file = {codec_of(codec), block_bytes, in_background && sink.in_background, sums_content};
  options.progress = [progress](std::int64_t num_bytes) { report(progress, num_bytes); };
  const WithoutGil without_gil;
  return write_rows(*cut, *sink.sink, options);
}

/// (keys, counts, steps, clicks), int64 (n,) each; or None.
nb::object records_of(const PyCut& cut) {
  const std::optional<std::vector<AdmitRecord>>& records = cut->admission();
  if (!records) return nb::none();
  return tuple_of_records(*records);
}

/// As Table.shared_rows; None: the table has none.
nb::object shared_of(const PyCut& cut) {
  const std::optional<SharedRows>& rows = cut->shared_rows();
  return rows ? nb::object(tuple_of_shared(*rows, cut->layout())) : nb::none();
}

/// The engine's restore, one call at a time.
class PyRestore {
 public:
  explicit PyRestore(PyTable& table)
      : dim_(table->layout().dim),
        state_width_(table->layout().state_width()),
        restore_(std::in_place, *table) {}
  ~PyRestore() {
    const WithoutGil without_gil;
    restore_.reset();
  }
  PyRestore(const PyRestore&) = delete;
  PyRestore& operator=(const PyRestore&) = delete;

  void add_file(PyRowFile& file, nb::handle owned,
                std::optional<std::pair<std::int64_t, std::int64_t>> modulo, bool drop_state,
                bool drop_metadata) {
    RestoreOptions options;
    Array shards;
    if (!owned.is_none()) {
      shards = outcomes(owned, "owned", kNumVirtualShards);
      options.owned = {static_cast<const std::uint8_t*>(shards.data),
                       static_cast<std::size_t>(kNumVirtualShards)};
    }
    if (modulo) options.modulo = RestoreOptions::Modulo{modulo->first, modulo->second};
    options.drop_state = drop_state;
    options.drop_metadata = drop_metadata;
    file.with_reader([&](RowFileReader& reader) {
      const std::lock_guard lock(mutex_);
      restore_->add_file(reader, options);
    });
  }

  void add_rows(const PyRowBlock& block) {
    const BlockArrays arrays(block, restore_->fields());
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    restore_->add_rows(arrays.keys.span(), arrays.fields);
  }

  /// int64 (n,) each, clicks or None
  void add_records(nb::handle keys_object, nb::handle counts_object, nb::handle steps_object,
                   nb::handle clicks_object) {
    const std::vector<AdmitRecord> records =
        joined_records(keys_object, counts_object, steps_object, clicks_object);
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    restore_->add_records(records);
  }

  /// Keys (n,), weights (n, D), state (n, S) or None
  void add_shared(nb::handle keys_object, nb::handle weights_object, nb::handle state_object) {
    const Keys keys(keys_object);
    const auto n = static_cast<std::int64_t>(keys.size());
    const Array weights = floats(weights_object, "weights", n, dim_);
    Array state;
    if (!state_object.is_none()) state = floats(state_object, "state", n, state_width_);
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    restore_->add_shared(keys.span(), float_data(weights), static_cast<const float*>(state.data));
  }

  void check(std::uint64_t update_count, double log_decay) {
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    restore_->check(update_count, log_decay);
  }

  void commit(std::uint64_t update_count, double log_decay, const EvictionState& state) {
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    restore_->commit(update_count, log_decay, state);
  }

  std::int64_t num_rows() {
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    return restore_->num_rows();
  }

 private:
  const std::int64_t dim_;
  const std::int64_t state_width_;
  std::mutex mutex_;
  std::optional<Restore> restore_;
};

}  // namespace

void bind_checkpoint(nb::module_& module) {
  nb::class_<PyCut>(module, "Cut")
      .def_prop_ro("num_rows", [](const PyCut& cut) { return cut->num_rows(); })
      .def_prop_ro("num_erased", [](const PyCut& cut) { return cut->num_erased(); })
      .def_prop_ro("changes_only", [](const PyCut& cut) { return cut->changes_only(); })
      .def_prop_ro("update_count", [](const PyCut& cut) { return cut->update_count(); })
      .def_prop_ro("learning_rate", [](const PyCut& cut) { return cut->learning_rate(); })
      .def_prop_ro("log_decay", [](const PyCut& cut) { return cut->log_decay(); })
      .def_prop_ro("eviction", [](const PyCut& cut) { return cut->eviction(); })
      .def_prop_ro("admission", &records_of)
      .def_prop_ro("shared_rows", &shared_of)
      .def_prop_ro("copied_bytes", [](const PyCut& cut) { return cut->copied_bytes(); })
      .def_prop_ro("max_copied_bytes", [](const PyCut& cut) { return cut->max_copied_bytes(); })
      .def_prop_ro("is_finished", [](const PyCut& cut) { return cut->is_finished(); })
      .def(
          "prepare_copies", [](PyCut& cut) { (*cut).prepare_copies(); },
          nb::call_guard<WithoutGil>())
      .def(
          "finish", [](PyCut& cut, bool durable) { (*cut).finish(durable); }, nb::arg("durable"),
          nb::call_guard<WithoutGil>());
  module.def("write_rows", &write_cut, nb::arg("cut"), nb::arg("write"), nb::arg("token"),
             nb::arg("codec") = "none", nb::arg("block_bytes") = kDefaultBlockBytes,
             nb::arg("progress").none() = nb::none(), nb::arg("name") = "row file",
             nb::arg("in_background") = true, nb::arg("sums_content") = false);
  nb::class_<PyRestore>(module, "Restore")
      .def(nb::init<PyTable&>(), nb::arg("table"))
      .def("add_file", &PyRestore::add_file, nb::arg("row_file"),
           nb::arg("owned").none() = nb::none(), nb::arg("modulo").none() = nb::none(),
           nb::arg("drop_state") = false, nb::arg("drop_metadata") = false)
      .def_prop_ro("num_rows", &PyRestore::num_rows)
      .def("add_rows", &PyRestore::add_rows, nb::arg("block"))
      .def("add_records", &PyRestore::add_records, nb::arg("keys"), nb::arg("counts"),
           nb::arg("steps"), nb::arg("clicks").none())
      .def("add_shared", &PyRestore::add_shared, nb::arg("keys").none(), nb::arg("weights").none(),
           nb::arg("state").none())
      .def("check",
           dropping_abandoned(+[](PyRestore& restore, std::uint64_t update_count,
                                  double log_decay) { restore.check(update_count, log_decay); }),
           nb::arg("update_count"), nb::arg("log_decay") = 0.0)
      .def("commit",
           dropping_abandoned(
               +[](PyRestore& restore, std::uint64_t update_count, double log_decay,
                   const EvictionState& state) { restore.commit(update_count, log_decay, state); }),
           nb::arg("update_count"), nb::arg("log_decay") = 0.0, nb::arg("state") = EvictionState());
}

}  // namespace recsdk::bind
