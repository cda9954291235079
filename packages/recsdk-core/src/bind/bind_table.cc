// table.h: Table, TableStats.
#include "recsdk/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "arguments/busy.h"
#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/refusals.h"
#include "bindings.h"
#include "index_calls.h"
#include "recsdk/key_metadata.h"

namespace recsdk::bind {
namespace {

/// (result, outcomes) or the result alone.
nb::object with_outcomes(Result result, std::optional<Result> outcomes) {
  if (!outcomes) return std::move(result.object);
  return nb::make_tuple(std::move(result.object), std::move(outcomes->object));
}

/// Keys as mapped to rows within one call.
struct Mapped {
  std::vector<RowNumber> rows;
  std::vector<Outcome> own_outcomes;
  std::span<Outcome> outcomes;

  Mapped(std::size_t n, std::span<Outcome> given)
      : rows(n),
        own_outcomes(given.empty() ? n : 0),
        outcomes(given.empty() ? own_outcomes : given) {}
};

nb::object find_or_insert(PyTable& table, nb::handle keys_object, nb::handle lease,
                          nb::handle outcomes, nb::handle times, nb::handle scores,
                          nb::handle counts, nb::handle clicks, nb::handle now) {
  const Keys keys(keys_object);
  const PyKeyData data(times, scores, counts, clicks, now);
  const Lease* batch = lease_of(lease);
  Result values =
      make_floats(keys.framework(), static_cast<std::int64_t>(keys.size()), table->config().dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    table->find_or_insert(keys.span(), static_cast<float*>(values.data),
                          span_of(kinds, keys.size()), batch, data.get());
  }
  return with_outcomes(std::move(values), std::move(kinds));
}

nb::object lookup(PyTable& table, nb::handle keys_object, nb::handle outcomes) {
  const Keys keys(keys_object);
  Result values =
      make_floats(keys.framework(), static_cast<std::int64_t>(keys.size()), table->config().dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    table->lookup(keys.span(), static_cast<float*>(values.data), span_of(kinds, keys.size()));
  }
  return with_outcomes(std::move(values), std::move(kinds));
}

nb::object upsert(PyTable& table, nb::handle keys_object, nb::handle values_object,
                  nb::handle state_object, nb::handle outcomes, nb::handle times, nb::handle scores,
                  nb::handle clicks, nb::handle now) {
  const Keys keys(keys_object);
  const PyKeyData data(times, scores, nb::none(), clicks, now);
  const auto n = static_cast<std::int64_t>(keys.size());
  const Array values = floats(values_object, "values", n, table->config().dim);
  Array state;
  if (!state_object.is_none())
    state = floats(state_object, "state", n, table->layout().state_width());
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    table->upsert(keys.span(), float_data(values), float_data(state), span_of(kinds, keys.size()),
                  data.get());
  }
  return outcomes_or_none(std::move(kinds));
}

nb::object apply_gradients(PyTable& table, nb::handle keys_object, nb::handle gradients_object,
                           nb::handle outcomes) {
  const Keys keys(keys_object);
  const Array gradients = floats(gradients_object, "gradients",
                                 static_cast<std::int64_t>(keys.size()), table->config().dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    table->apply_gradients(keys.span(), float_data(gradients), span_of(kinds, keys.size()));
  }
  return outcomes_or_none(std::move(kinds));
}

/// The engine checks this too, but only once the keys are mapped and maybe inserted.
void require_offsets(std::span<const std::int64_t> offsets, std::int64_t num_keys) {
  if (offsets.front() != 0 || offsets.back() != num_keys)
    throw nb::value_error(("offsets must run from 0 to the number of keys, " +
                           std::to_string(num_keys) + ", got " + std::to_string(offsets.front()) +
                           " to " + std::to_string(offsets.back()) + "; pass B + 1 of them")
                              .c_str());
  if (!std::is_sorted(offsets.begin(), offsets.end())) refuse_descent("offsets", offsets);
}

/// Offsets, weights and pooling of bags over keys that are yet to be mapped. Throws for any that
/// are wrong, before a table changes.
struct BagArguments {
  Integers offsets;
  Array weights;
  Bags bags;

  BagArguments(const Keys& keys, nb::handle offsets_object, nb::handle weights_object,
               nb::handle pooling)
      : offsets(offsets_object, "offsets") {
    require_some_offsets(offsets.span());
    bags.offsets = offsets.span();
    require_offsets(bags.offsets, static_cast<std::int64_t>(keys.size()));
    if (!weights_object.is_none()) {
      weights = floats(weights_object, "weights", static_cast<std::int64_t>(keys.size()));
      bags.weights = {float_data(weights), keys.size()};
    }
    bags.pooling = pooling_of(pooling);
  }
};

nb::object pool(PyTable& table, nb::handle keys_object, nb::handle offsets, nb::handle weights,
                nb::handle pooling, bool insert, nb::handle lease, nb::handle outcomes) {
  const Keys keys(keys_object);
  BagArguments arguments(keys, offsets, weights, pooling);
  const Lease* batch = lease_of(lease);
  const std::int64_t dim = table->config().dim;
  Result pooled = make_floats(keys.framework(), arguments.bags.num_bags(), dim);
  std::optional<Result> kinds = make_outcomes_if(outcomes, keys);
  {
    const WithoutGil without_gil;
    if (insert || batch != nullptr) {
      Mapped mapped(keys.size(), span_of(kinds, keys.size()));
      const Lease own = batch == nullptr ? table->lease() : Lease();  // rows stay the keys' own
      table->map(keys.span(), mapped.rows, mapped.outcomes, {insert, batch});
      arguments.bags.rows = mapped.rows;
      arguments.bags.outcomes = mapped.outcomes;
      const PoolBlock block{arguments.bags, static_cast<float*>(pooled.data), dim};
      table->pool({&block, 1});
    } else {
      const Bags& bags = arguments.bags;
      table->pool_keys({keys.span(), bags.offsets, bags.weights, bags.pooling},
                       static_cast<float*>(pooled.data), dim, span_of(kinds, keys.size()));
    }
  }
  return with_outcomes(std::move(pooled), std::move(kinds));
}

nb::object pool_backward(PyTable& table, nb::handle keys_object, nb::handle offsets,
                         nb::handle grad_object, nb::handle weights, nb::handle pooling,
                         nb::handle return_weights_grad) {
  const Keys keys(keys_object);
  const bool wants_grad = flag(return_weights_grad, "return_weights_grad");
  BagArguments arguments(keys, offsets, weights, pooling);
  const std::int64_t dim = table->config().dim;
  const Array grad = floats(grad_object, "grad", arguments.bags.num_bags(), dim);
  if (wants_grad && weights.is_none())
    throw nb::value_error("return_weights_grad needs weights; pass weights of shape (N,)");
  std::optional<Result> weights_grad;
  if (wants_grad)
    weights_grad = make_floats(keys.framework(), static_cast<std::int64_t>(keys.size()));
  {
    const WithoutGil without_gil;
    Mapped mapped(keys.size(), {});
    const Lease own = table->lease();
    table->map(keys.span(), mapped.rows, mapped.outcomes);
    arguments.bags.rows = mapped.rows;
    arguments.bags.outcomes = mapped.outcomes;
    const GradBlock block{arguments.bags, float_data(grad), dim,
                          weights_grad ? static_cast<float*>(weights_grad->data) : nullptr};
    table->update({&block, 1});
  }
  return weights_grad ? std::move(weights_grad->object) : nb::none();
}

nb::object pool_rows(PyTable& table, nb::handle bags_object) {
  const PyBags& bags = bags_of(bags_object);
  const std::int64_t dim = table->config().dim;
  Result pooled = make_floats(bags.framework(), bags.num_bags(), dim);
  const PoolBlock block{bags.get(), static_cast<float*>(pooled.data), dim};
  {
    const WithoutGil without_gil;
    table->pool({&block, 1});
  }
  return std::move(pooled.object);
}

void update_rows(PyTable& table, nb::handle bags_object, nb::handle grad_object,
                 nb::handle weights_grad_object) {
  const PyBags& bags = bags_of(bags_object);
  const std::int64_t dim = table->config().dim;
  const Array grad = floats(grad_object, "grad", bags.num_bags(), dim);
  Array weights_grad;
  if (!weights_grad_object.is_none()) {
    weights_grad = floats(weights_grad_object, "weights_grad", bags.num_keys());
    require_writable(weights_grad);
  }
  const GradBlock block{bags.get(), float_data(grad), dim, static_cast<float*>(weights_grad.data)};
  const WithoutGil without_gil;
  table->update({&block, 1});
}

/// float32 (N,)
nb::object norm_factors(PyTable& table, nb::handle bags_object, double max_norm, double norm_type) {
  const PyBags& bags = bags_of(bags_object);
  Result factors = make_floats(bags.framework(), bags.num_keys());
  const Bags& mapped = bags.get();
  {
    const WithoutGil without_gil;
    table->norm_factors(mapped.rows, mapped.outcomes, {max_norm, norm_type},
                        static_cast<float*>(factors.data));
  }
  return std::move(factors.object);
}

std::int64_t limit_norms(PyTable& table, nb::handle bags_object, double max_norm,
                         double norm_type) {
  const Bags& mapped = bags_of(bags_object).get();
  const WithoutGil without_gil;
  return table->limit_norms(mapped.rows, mapped.outcomes, {max_norm, norm_type});
}

/// (where to go on, keys (n,), weights (n, D), state (n, S) or None)
nb::tuple export_rows(PyTable& table, RowNumber begin, std::int64_t capacity, bool with_state) {
  const std::int64_t width = with_state ? table->layout().state_width() : 0;
  Result keys = make_rows(Framework::kNumpy, capacity);
  Result weights = make_floats(Framework::kNumpy, capacity, table->config().dim);
  Result state = make_floats(Framework::kNumpy, width > 0 ? capacity : 0, width);
  const ExportBuffer buffer{capacity, static_cast<Key*>(keys.data),
                            static_cast<float*>(weights.data),
                            width > 0 ? static_cast<float*>(state.data) : nullptr};
  std::int64_t n = 0;
  {
    const WithoutGil without_gil;
    n = table->export_rows(begin, buffer);
  }
  const nb::slice part(nb::int_(0), nb::int_(n), nb::none());
  return nb::make_tuple(begin, keys.object[part], weights.object[part],
                        width > 0 ? nb::object(state.object[part]) : nb::none());
}

/// Keys (n,), weights (n, D), state (n, S): of rows that keys without one share.
nb::tuple shared_rows(PyTable& table) {
  SharedRows found;
  {
    const WithoutGil without_gil;
    found = table->shared_rows();
  }
  return tuple_of_shared(found, table->layout());
}

nb::dict stats(PyTable& table) {
  TableStats found;
  {
    const WithoutGil without_gil;
    found = table->stats();
  }
  nb::dict made = stats_of(found);
  made["updates"] = found.updates;
  made["nonfinite"] = found.nonfinite;
  made["row_bytes"] = found.row_bytes;
  made["checkpoint_copied_bytes"] = found.checkpoint_copied_bytes;
  made["checkpoint_waits"] = found.checkpoint_waits;
  made["checkpoint_wait_seconds"] = found.checkpoint_wait_seconds;
  return made;
}

void make_table(PyTable* place, std::int64_t dim, std::string name,
                const OptimizerConfig& optimizer, const InitializerConfig& initializer,
                std::uint64_t seed, std::optional<std::uint64_t> hash_seed,
                std::optional<std::int64_t> max_rows, std::optional<std::int64_t> eviction_groups,
                const std::optional<std::pair<std::int64_t, std::int64_t>>& owned_groups,
                OnFull on_full, const DefaultConfig& default_row, NonFinite on_nonfinite,
                DType weight_dtype, Rounding rounding, std::optional<int> num_threads,
                const std::optional<EvictConfig>& eviction,
                const std::optional<AdmitConfig>& admission) {
  new (place) PyTable({dim, std::move(name), optimizer, initializer, seed, hash_seed, max_rows,
                       eviction_groups, group_range(owned_groups), on_full, default_row,
                       on_nonfinite, weight_dtype, rounding, num_threads, eviction, admission});
}

}  // namespace

void bind_table(nb::module_& module) {
  const nb::call_guard<WithoutGil> without_gil;
  nb::class_<PyTable>(module, "Table", nb::type_slots(FunctionSlots<PyTable>::slots))
      .def("__init__", &make_table, nb::arg("dim"), nb::arg("name"), nb::arg("optimizer"),
           nb::arg("initializer"), nb::arg("seed"), nb::arg("hash_seed").none(),
           nb::arg("max_rows").none(), nb::arg("eviction_groups").none(),
           nb::arg("owned_groups").none(), nb::arg("on_full"), nb::arg("default_row"),
           nb::arg("on_nonfinite"), nb::arg("weight_dtype"), nb::arg("rounding"),
           nb::arg("num_threads").none(), nb::arg("eviction").none(), nb::arg("admission").none())
      .def("state_fields", [](PyTable& table) { return state_fields(table->layout()); })
      .def(
          "lease",
          [](PyTable& table, std::optional<std::int64_t> step) {
            return PyLease(table->lease(step));
          },
          nb::arg("step").none(), without_gil)
      .def(
          "cut",
          [](PyTable& table, bool changes_only, std::optional<std::int64_t> max_copy_bytes) {
            return PyCut(table->cut({changes_only, max_copy_bytes}));
          },
          nb::arg("changes_only"), nb::arg("max_copy_bytes").none(), without_gil)
      .def(
          "is_tracking", [](PyTable& table) { return table->is_tracking(); }, without_gil)
      .def("map",
           dropping_abandoned(+[](PyTable& table, nb::handle keys, nb::handle insert,
                                  nb::handle lease, nb::handle times, nb::handle scores,
                                  nb::handle counts, nb::handle clicks, nb::handle now) {
             const PyKeyData data(times, scores, counts, clicks, now);
             return map(table->index(), keys, insert, lease, data.get());
           }),
           nb::arg("keys").none(), nb::arg("insert").none(), nb::arg("lease").none(),
           nb::arg("times").none(), nb::arg("scores").none(), nb::arg("counts").none(),
           nb::arg("clicks").none(), nb::arg("now").none())
      .def("find_or_insert", dropping_abandoned(&find_or_insert), nb::arg("keys").none(),
           nb::arg("lease").none(), nb::arg("return_outcomes").none(), nb::arg("times").none(),
           nb::arg("scores").none(), nb::arg("counts").none(), nb::arg("clicks").none(),
           nb::arg("now").none())
      .def("lookup", &lookup, nb::arg("keys").none(), nb::arg("return_outcomes").none())
      .def("upsert", dropping_abandoned(&upsert), nb::arg("keys").none(), nb::arg("values").none(),
           nb::arg("state").none(), nb::arg("return_outcomes").none(), nb::arg("times").none(),
           nb::arg("scores").none(), nb::arg("clicks").none(), nb::arg("now").none())
      .def("erase", dropping_abandoned(+[](PyTable& table, nb::handle keys, nb::handle outcomes) {
             return erase(table->index(), keys, outcomes);
           }),
           nb::arg("keys").none(), nb::arg("return_outcomes").none())
      .def("clear", dropping_abandoned(+[](PyTable& table) { table->clear(); }), without_gil)
      .def("evict", dropping_abandoned(+[](PyTable& table, std::int64_t max_rows) {
             return table->evict(max_rows);
           }),
           nb::arg("max_rows"), without_gil)
      .def(
          "would_evict",
          [](PyTable& table, std::int64_t max_rows) {
            return would_evict(table->index(), max_rows);
          },
          nb::arg("max_rows"), without_gil)
      .def("expire", dropping_abandoned(+[](PyTable& table) { return table->index().expire(); }),
           without_gil)
      .def(
          "would_expire", [](PyTable& table) { return would_expire(table->index()); }, without_gil)
      .def(
          "steps_to_look",
          [](PyTable& table, std::int64_t step) { return steps_to_look(table->index(), step); },
          nb::arg("step"), without_gil)
      .def(
          "decided",
          [](PyTable& table) {
            const Decided found = decided(table->index());
            return std::pair(found.num_keys, found.step);
          },
          without_gil)
      .def(
          "standing",
          [](PyTable& table, std::uint64_t key) { return standing(table->index(), key); },
          nb::arg("key"))
      .def("evict_where",
           dropping_abandoned(+[](PyTable& table, const nb::callable& choose, bool is_dry) {
             return evict_where(table->index(), choose, is_dry);
           }),
           nb::arg("choose"), nb::arg("is_dry"))
      .def("metadata_names", [](PyTable& table) { return metadata_names_of(table->index()); })
      .def(
          "eviction_state", [](PyTable& table) { return eviction_state(table->index()); },
          without_gil)
      .def("leavers",
           dropping_abandoned(+[](PyTable& table, std::int64_t max_rows, OnOverflow on_overflow,
                                  double block_seconds) {
             return PyLeavers(table->leavers({max_rows, on_overflow, block_seconds}),
                              table->config().dim, table->layout().state_width());
           }),
           nb::arg("max_rows"), nb::arg("on_overflow"), nb::arg("block_seconds"), without_gil)
      .def(
          "set_time", [](PyTable& table, std::int64_t time) { table->set_time(time); },
          nb::arg("time"), without_gil)
      .def(
          "time", [](PyTable& table) { return table->index().time(); }, without_gil)
      .def("apply_gradients", &apply_gradients, nb::arg("keys").none(), nb::arg("gradients").none(),
           nb::arg("return_outcomes").none())
      .def("pool", dropping_abandoned(&pool), nb::arg("keys").none(), nb::arg("offsets").none(),
           nb::arg("weights").none(), nb::arg("pooling").none(), nb::arg("insert"),
           nb::arg("lease").none(), nb::arg("return_outcomes").none())
      .def("pool_backward", &pool_backward, nb::arg("keys").none(), nb::arg("offsets").none(),
           nb::arg("grad").none(), nb::arg("weights").none(), nb::arg("pooling").none(),
           nb::arg("return_weights_grad").none())
      .def("pool_rows", &pool_rows, nb::arg("bags").none())
      .def("update_rows", &update_rows, nb::arg("bags").none(), nb::arg("grad").none(),
           nb::arg("weights_grad").none())
      .def("limit_norms", &limit_norms, nb::arg("bags").none(), nb::arg("max_norm"),
           nb::arg("norm_type"))
      .def("norm_factors", &norm_factors, nb::arg("bags").none(), nb::arg("max_norm"),
           nb::arg("norm_type"))
      .def("export_rows", &export_rows, nb::arg("begin"), nb::arg("capacity"),
           nb::arg("with_state"))
      .def(
          "set_learning_rate", [](PyTable& table, float rate) { table->set_learning_rate(rate); },
          nb::arg("learning_rate"), without_gil)
      .def(
          "update_count", [](PyTable& table) { return table->update_count(); }, without_gil)
      .def(
          "log_decay", [](PyTable& table) { return table->log_decay(); }, without_gil)
      .def(
          "set_log_decay",
          [](PyTable& table, double log_decay) { table->set_log_decay(log_decay); },
          nb::arg("log_decay"), without_gil)
      .def(
          "set_update_count",
          [](PyTable& table, std::uint64_t count) { table->set_update_count(count); },
          nb::arg("count"), without_gil)
      .def(
          "size", [](PyTable& table) { return table->size(); }, without_gil)
      .def("shared_rows", &shared_rows)
      .def("stats", &stats)
      .def(
          "memory_bytes", [](PyTable& table) { return table->memory_bytes(); }, without_gil)
      .def(
          "reserve", [](PyTable& table, std::int64_t num_rows) { table->reserve(num_rows); },
          nb::arg("num_rows"), without_gil)
      .def("check_idle", dropping_abandoned(+[](PyTable& table) { table->index().check_idle(); }),
           without_gil)
      .def("check_invariants", [](PyTable& table) { table->check_invariants(); }, without_gil);
}

}  // namespace recsdk::bind
