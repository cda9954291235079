// The functions of c_api.h for tables in a device's memory.
#include "recsdk/device_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "c_api/convert.h"
#include "c_api/status.h"
#include "recsdk/c_api.h"

struct recsdk_device_table {
  recsdk::DeviceTable table;
};

namespace {

using recsdk::c_api::array;
using recsdk::c_api::deref;
using recsdk::c_api::guarded;
using recsdk::c_api::lease_of;
using recsdk::c_api::optional_array;
using recsdk::c_api::outcomes_of;
using recsdk::c_api::read_struct;
using recsdk::c_api::write_struct;

recsdk::DeviceTable& table_of(recsdk_device_table* table) { return deref(table, "table").table; }
const recsdk::DeviceTable& table_of(const recsdk_device_table* table) {
  return deref(table, "table").table;
}

constexpr const char* kOptions = "recsdk_device_options";

recsdk_device_options option_defaults() {
  const recsdk::DeviceOptions defaults;
  recsdk_device_options c{};
  c.struct_size = sizeof(c);
  c.backend = "npu";
  c.max_device_rows = defaults.max_device_rows;
  c.device = defaults.device;
  return c;
}

recsdk::DeviceOptions device_options(const recsdk_device_options* given) {
  const recsdk_device_options c = read_struct(given, option_defaults(), kOptions);
  if (c.reserved != 0)
    recsdk::c_api::reject_value("recsdk_device_options.reserved", c.reserved, "0");
  recsdk::DeviceOptions options;
  options.backend = &deref(c.backend, "recsdk_device_options.backend");
  options.device = c.device;
  options.max_device_rows = c.max_device_rows;
  return options;
}

}  // namespace

int recsdk_require_backend(const char* backend) {
  return guarded([&] { recsdk::require_backend(&deref(backend, "backend")); });
}

int recsdk_device_options_init(recsdk_device_options* options) {
  return guarded([&] { write_struct(options, option_defaults(), kOptions); });
}

int recsdk_device_table_create(const recsdk_table_config* config,
                               const recsdk_device_options* options, recsdk_device_table** table) {
  return guarded([&] {
    deref(table, "table");
    recsdk::TableConfig converted = recsdk::c_api::table_config(config);
    recsdk::DeviceOptions where = device_options(options);
    *table = new recsdk_device_table{recsdk::DeviceTable(std::move(converted), std::move(where))};
  });
}

void recsdk_device_table_destroy(recsdk_device_table* table) { delete table; }

int recsdk_device_table_synchronize(const recsdk_device_table* table) {
  return guarded([&] { table_of(table).synchronize(); });
}

int recsdk_device_table_stream(const recsdk_device_table* table, void** stream) {
  return guarded([&] { deref(stream, "stream") = table_of(table).stream(); });
}

int recsdk_device_table_lease(recsdk_device_table* table, int has_step, int64_t step,
                              recsdk_lease** lease) {
  return guarded([&] { recsdk::c_api::take_lease(table_of(table), has_step, step, lease); });
}

int recsdk_device_table_map(recsdk_device_table* table, const int64_t* keys, int64_t num_keys,
                            int insert, const recsdk_lease* lease, int64_t* rows,
                            uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).map(array(keys, num_keys, "keys"), array(rows, num_keys, "rows"),
                        outcomes_of(array(outcomes, num_keys, "outcomes")),
                        {.insert = insert != 0, .lease = lease_of(lease)});
  });
}

int recsdk_device_table_gather(recsdk_device_table* table, const int64_t* rows,
                               const uint8_t* outcomes, int64_t num_keys, float* out) {
  return guarded([&] {
    table_of(table).gather(array(rows, num_keys, "rows"),
                           outcomes_of(array(outcomes, num_keys, "outcomes")), out);
  });
}

int recsdk_device_table_update(recsdk_device_table* table, const int64_t* rows,
                               const uint8_t* outcomes, int64_t num_keys, const float* gradients) {
  return guarded([&] {
    table_of(table).update(array(rows, num_keys, "rows"),
                           outcomes_of(array(outcomes, num_keys, "outcomes")), gradients);
  });
}

int recsdk_device_table_read_rows(const recsdk_device_table* table, const int64_t* keys,
                                  int64_t num_keys, float* values, float* state,
                                  uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).read_rows(array(keys, num_keys, "keys"),
                              array(values, num_keys, "values").data(), state,
                              outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_device_table_lookup(const recsdk_device_table* table, const int64_t* keys,
                               int64_t num_keys, float* values, uint8_t* outcomes) {
  return recsdk_device_table_read_rows(table, keys, num_keys, values, nullptr, outcomes);
}

int recsdk_device_table_find_or_insert(recsdk_device_table* table, const int64_t* keys,
                                       int64_t num_keys, const recsdk_lease* lease, float* values,
                                       uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).find_or_insert(
        array(keys, num_keys, "keys"), array(values, num_keys, "values").data(),
        outcomes_of(optional_array(outcomes, num_keys, "outcomes")), lease_of(lease));
  });
}

int recsdk_device_table_upsert(recsdk_device_table* table, const int64_t* keys, int64_t num_keys,
                               const float* values, const float* state, uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).upsert(array(keys, num_keys, "keys"), array(values, num_keys, "values").data(),
                           state, outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_device_table_erase(recsdk_device_table* table, const int64_t* keys, int64_t num_keys,
                              uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).erase(array(keys, num_keys, "keys"),
                          outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_device_table_clear(recsdk_device_table* table) {
  return guarded([&] { table_of(table).clear(); });
}

int recsdk_device_table_apply_gradients(recsdk_device_table* table, const int64_t* keys,
                                        int64_t num_keys, const float* gradients,
                                        uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).apply_gradients(array(keys, num_keys, "keys"),
                                    array(gradients, num_keys, "gradients").data(),
                                    outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_device_table_export_rows(const recsdk_device_table* table, int64_t* begin,
                                    int64_t capacity, int64_t* keys, float* weights, float* state,
                                    int64_t* num_rows) {
  return guarded([&] {
    const recsdk::DeviceTable& of = table_of(table);
    deref(num_rows, "num_rows");
    array(keys, capacity, "keys");
    *num_rows =
        of.export_rows(deref(begin, "begin"),
                       {.capacity = capacity, .keys = keys, .weights = weights, .state = state});
  });
}

int recsdk_device_table_learning_rate(const recsdk_device_table* table, float* learning_rate) {
  return guarded([&] { deref(learning_rate, "learning_rate") = table_of(table).learning_rate(); });
}

int recsdk_device_table_set_learning_rate(recsdk_device_table* table, float learning_rate) {
  return guarded([&] { table_of(table).set_learning_rate(learning_rate); });
}

int recsdk_device_table_update_count(const recsdk_device_table* table, uint64_t* count) {
  return guarded([&] { deref(count, "count") = table_of(table).update_count(); });
}

int recsdk_device_table_set_update_count(recsdk_device_table* table, uint64_t count) {
  return guarded([&] { table_of(table).set_update_count(count); });
}

int recsdk_device_table_size(const recsdk_device_table* table, int64_t* size) {
  return guarded([&] { deref(size, "size") = table_of(table).size(); });
}

int recsdk_device_table_state_width(const recsdk_device_table* table, int64_t* width) {
  return guarded([&] { deref(width, "width") = table_of(table).layout().state_width(); });
}

int recsdk_device_table_stats(const recsdk_device_table* table, recsdk_device_stats* stats) {
  return guarded([&] {
    const recsdk::DeviceTableStats from = table_of(table).stats();
    recsdk_device_stats to{};
    to.num_rows = from.num_rows;
    to.num_rows_in_flight = from.num_rows_in_flight;
    std::copy_n(from.outcomes, RECSDK_NUM_OUTCOMES, to.outcomes);
    to.erased = from.erased;
    to.updates = from.updates;
    to.host_bytes = from.host_bytes;
    to.pinned_bytes = from.pinned_bytes;
    to.device_bytes = from.device_bytes;
    write_struct(stats, to, "recsdk_device_stats");
  });
}

int recsdk_device_table_check_invariants(const recsdk_device_table* table) {
  return guarded([&] { table_of(table).check_invariants(); });
}
