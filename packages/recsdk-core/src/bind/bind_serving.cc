// freeze.h, serving/serving_table.h
#include "recsdk/serving/serving_table.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/refusals.h"
#include "arguments/row_files.h"
#include "bindings.h"
#include "index_calls.h"
#include "recsdk/freeze.h"

namespace recsdk::bind {
namespace {

constexpr const char* kDTypes[kNumFrozenDTypes] = {"float32", "bfloat16", "float16", "int8",
                                                   "int4"};

FrozenDType dtype_of(const std::string& name) {
  for (int i = 0; i < kNumFrozenDTypes; ++i) {
    if (name == kDTypes[i]) return static_cast<FrozenDType>(i);
  }
  throw nb::value_error(
      ("dtype must be 'float32', 'bfloat16', 'float16', 'int8' or 'int4', got '" + name + "'")
          .c_str());
}

void make_writer(FrozenWriter* place, const std::string& name, std::int64_t dim,
                 const std::string& dtype, float default_value, std::int64_t num_shards,
                 std::int64_t num_shared, std::int64_t expected_rows, const nb::bytes& token,
                 std::uint32_t table, std::uint64_t hash_seed, const nb::bytes& scratch_folder) {
  FreezeConfig config{name,       dim,           dtype_of(dtype), default_value, num_shards,
                      num_shared, expected_rows, token_of(token), table,         hash_seed,
                      {}};
  config.scratch_folder.assign(scratch_folder.c_str(), scratch_folder.size());
  new (place) FrozenWriter(config);
}

/// Adds rows of keys to a writer or a delta, by one of its methods.
template <auto kAdd, class To>
void add(To& to, nb::handle keys_object, nb::handle weights_object, std::int64_t dim) {
  const Keys keys(keys_object);
  const Array weights =
      floats(weights_object, "weights", static_cast<std::int64_t>(keys.size()), dim);
  const WithoutGil without_gil;
  (to.*kAdd)(keys.span(), float_data(weights));
}

nb::tuple write_shard(FrozenWriter& writer, std::int64_t shard, int descriptor,
                      const std::string& name) {
  FrozenFileSummary summary;
  {
    const WithoutGil without_gil;
    summary = writer.write_shard(shard, descriptor, name);
  }
  return nb::make_tuple(summary.num_rows, summary.num_bytes, summary.checksum);
}

void open_table(ServingTable* place, const std::vector<nb::bytes>& files) {
  std::vector<std::string> paths;
  for (const nb::bytes& file : files) paths.emplace_back(file.c_str(), file.size());
  const WithoutGil without_gil;
  new (place) ServingTable(paths);
}

nb::dict info(const ServingTable& table) {
  const FrozenInfo& found = table.info();
  nb::dict made;
  made["name"] = found.name;
  made["dim"] = found.dim;
  made["dtype"] = kDTypes[static_cast<std::size_t>(found.dtype)];
  made["default_value"] = found.default_value;
  made["num_rows"] = found.num_rows;
  made["row_bytes"] = found.row_bytes;
  made["num_bytes"] = found.num_bytes;
  made["num_shards"] = found.num_shards;
  made["num_shared"] = found.num_shared;
  made["is_whole"] = table.is_whole();
  return made;
}

void make_delta(ServingDelta* place, const ServingTable& table) { new (place) ServingDelta(table); }

void erase_in_delta(ServingDelta& delta, nb::handle keys_object) {
  const Keys keys(keys_object);
  delta.erase(keys.span());
}

nb::object with_outcomes(Result result, std::optional<Result> outcomes) {
  if (!outcomes) return std::move(result.object);
  return nb::make_tuple(std::move(result.object), std::move(outcomes->object));
}

nb::object lookup(const ServingTable& table, nb::handle keys_object, nb::handle outcomes) {
  const Keys keys(keys_object);
  Result values =
      make_floats(keys.framework(), static_cast<std::int64_t>(keys.size()), table.info().dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    table.lookup(keys.span(), static_cast<float*>(values.data), span_of(kinds, keys.size()));
  }
  return with_outcomes(std::move(values), std::move(kinds));
}

/// Bags of raw keys, as Python gives them.
struct BagArguments {
  Keys keys;
  Integers offsets;
  Array weights;
  ServingBags bags;

  BagArguments(nb::handle keys_object, nb::handle offsets_object, nb::handle weights_object,
               nb::handle pooling)
      : keys(keys_object), offsets(offsets_object, "offsets") {
    require_some_offsets(offsets.span());
    bags = {keys.span(), offsets.span(), {}, pooling_of(pooling)};
    if (!weights_object.is_none()) {
      weights = floats(weights_object, "weights", static_cast<std::int64_t>(keys.size()));
      bags.weights = {float_data(weights), keys.size()};
    }
  }
};

nb::object pool(const ServingTable& table, nb::handle keys, nb::handle offsets, nb::handle weights,
                nb::handle pooling, nb::handle outcomes) {
  const BagArguments arguments(keys, offsets, weights, pooling);
  const std::int64_t dim = table.info().dim;
  Result pooled = make_floats(arguments.keys.framework(), arguments.bags.num_bags(), dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, arguments.keys);
  {
    const WithoutGil without_gil;
    table.pool({arguments.bags, static_cast<float*>(pooled.data), dim,
                span_of(kinds, arguments.keys.size())});
  }
  return with_outcomes(std::move(pooled), std::move(kinds));
}

void pool_all(nb::handle calls) {
  std::vector<nb::tuple> kept;
  std::deque<BagArguments> bags;
  std::vector<ServingCall> made;
  for (const nb::handle object : sequence(calls, "calls")) {
    const nb::tuple& parts = kept.emplace_back(
        items(object, 5, 7, "(table, keys, offsets, out, column[, weights[, pooling]])"));
    if (!nb::isinstance<ServingTable>(parts[0]))
      throw nb::type_error(
          ("each call must start with a recsdk_core.serving.ServingTable, got " + shown(parts[0]))
              .c_str());
    const ServingTable& table = *nb::inst_ptr<ServingTable>(parts[0]);
    const nb::object weights = parts.size() > 5 ? nb::object(parts[5]) : nb::none();
    const nb::object pooling = parts.size() > 6 ? nb::object(parts[6]) : nb::str("sum");
    const BagArguments& of_call = bags.emplace_back(parts[1], parts[2], weights, pooling);
    const std::int64_t column = integer(parts[4], "column");
    Array out = matrix(parts[3], "out", of_call.bags.num_bags(), column, table.info().dim);
    require_writable(out);
    made.push_back(
        {&table, {of_call.bags, static_cast<float*>(out.data) + column, row_stride(out), {}}});
  }
  const WithoutGil without_gil;
  pool_serving(made);
}

}  // namespace

void bind_serving(nb::module_& module) {
  const nb::call_guard<WithoutGil> without_gil;
  module.attr("FROZEN_VERSION") = kFrozenVersion;
  nb::class_<FrozenWriter>(module, "FrozenWriter")
      .def("__init__", &make_writer, nb::arg("name"), nb::arg("dim"), nb::arg("dtype"),
           nb::arg("default_value"), nb::arg("num_shards"), nb::arg("num_shared"),
           nb::arg("expected_rows"), nb::arg("token"), nb::arg("table"), nb::arg("hash_seed"),
           nb::arg("scratch_folder"))
      .def("add", &add<&FrozenWriter::add, FrozenWriter>, nb::arg("keys").none(),
           nb::arg("weights").none(), nb::arg("dim"))
      .def("add_shared", &add<&FrozenWriter::add_shared, FrozenWriter>, nb::arg("keys").none(),
           nb::arg("weights").none(), nb::arg("dim"))
      .def_prop_ro("num_rows", &FrozenWriter::num_rows)
      .def("write_shard", &write_shard, nb::arg("shard"), nb::arg("descriptor"), nb::arg("name"));
  nb::class_<ServingTable>(module, "ServingTable")
      .def("__init__", &open_table, nb::arg("files"))
      .def("info", &info)
      .def("verify", &ServingTable::verify, without_gil)
      .def("preload", &ServingTable::preload, without_gil)
      .def_prop_ro("size", &ServingTable::size)
      .def_prop_ro("num_deltas", &ServingTable::num_deltas)
      .def_prop_ro("delta_bytes", &ServingTable::delta_bytes)
      .def("take", &ServingTable::take, nb::arg("delta"), without_gil)
      .def("lookup", &lookup, nb::arg("keys").none(), nb::arg("return_outcomes").none())
      .def("pool", &pool, nb::arg("keys").none(), nb::arg("offsets").none(),
           nb::arg("weights").none(), nb::arg("pooling").none(), nb::arg("return_outcomes").none());
  nb::class_<ServingDelta>(module, "ServingDelta")
      .def("__init__", &make_delta, nb::arg("table"))
      .def("add", &add<&ServingDelta::add, ServingDelta>, nb::arg("keys").none(),
           nb::arg("weights").none(), nb::arg("dim"))
      .def("add_shared", &add<&ServingDelta::add_shared, ServingDelta>, nb::arg("keys").none(),
           nb::arg("weights").none(), nb::arg("dim"))
      .def("erase", &erase_in_delta, nb::arg("keys").none())
      .def_prop_ro("num_rows", &ServingDelta::num_rows)
      .def_prop_ro("num_erased", &ServingDelta::num_erased);
  module.def("pool_serving", &pool_all, nb::arg("calls").none());
}

}  // namespace recsdk::bind
