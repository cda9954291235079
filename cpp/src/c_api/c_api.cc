// The functions of c_api.h: check, convert, call the C++ interface.
#include "recsdk/c_api.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c_api/convert.h"
#include "c_api/status.h"
#include "recsdk/recsdk.h"

namespace {

using recsdk::c_api::array;
using recsdk::c_api::convert_all;
using recsdk::c_api::deref;
using recsdk::c_api::grad_block;
using recsdk::c_api::guarded;
using recsdk::c_api::lease_of;
using recsdk::c_api::map_call;
using recsdk::c_api::optional_array;
using recsdk::c_api::outcomes_of;
using recsdk::c_api::pool_block;
using recsdk::c_api::table_of;
using recsdk::c_api::write_struct;

/// Names with the lifetime of the process.
struct IsaNames {
  std::vector<std::string> strings = recsdk::available_isas();
  std::vector<const char*> pointers;

  IsaNames() {
    for (const std::string& name : strings) pointers.push_back(name.c_str());
  }
  static const IsaNames& get() {
    static const IsaNames names;
    return names;
  }
};

}  // namespace

// The library and the process.

uint32_t recsdk_abi_version(void) { return RECSDK_ABI_VERSION; }

const char* recsdk_version(void) { return recsdk::version(); }

int recsdk_available_isas(const char* const** names, int64_t* num_names) {
  return guarded([&] {
    deref(names, "names");
    deref(num_names, "num_names");
    const IsaNames& isas = IsaNames::get();
    *names = isas.pointers.data();
    *num_names = static_cast<int64_t>(isas.pointers.size());
  });
}

int recsdk_isa(const char** name) {
  return guarded([&] {
    deref(name, "name");
    const std::string current = recsdk::isa();
    const std::vector<std::string>& known = IsaNames::get().strings;
    *name = std::find(known.begin(), known.end(), current)->c_str();
  });
}

int recsdk_set_isa(const char* name) {
  return guarded([&] { recsdk::set_isa(&deref(name, "name")); });
}

int recsdk_num_threads(int32_t* count) {
  return guarded([&] { deref(count, "count") = recsdk::num_threads(); });
}

int recsdk_set_num_threads(int32_t count) {
  return guarded([&] { recsdk::set_num_threads(count); });
}

int recsdk_table_hash(const char* name, uint64_t* hash) {
  return guarded([&] { deref(hash, "hash") = recsdk::table_hash(&deref(name, "name")); });
}

// Configurations.

int recsdk_optimizer_config_init(recsdk_optimizer_config* config, int32_t kind) {
  return guarded([&] {
    write_struct(config, recsdk::c_api::optimizer_defaults(kind), "recsdk_optimizer_config");
  });
}

int recsdk_initializer_config_init(recsdk_initializer_config* config) {
  return guarded([&] {
    write_struct(config, recsdk::c_api::initializer_defaults(), "recsdk_initializer_config");
  });
}

int recsdk_table_config_init(recsdk_table_config* config) {
  return guarded(
      [&] { write_struct(config, recsdk::c_api::table_defaults(), "recsdk_table_config"); });
}

// One table.

int recsdk_table_create(const recsdk_table_config* config, recsdk_table** table) {
  return guarded([&] {
    deref(table, "table");
    recsdk::TableConfig converted = recsdk::c_api::table_config(config);
    *table = new recsdk_table{recsdk::Table(std::move(converted))};
  });
}

void recsdk_table_destroy(recsdk_table* table) { delete table; }

int recsdk_table_layout(const recsdk_table* table, recsdk_row_layout* layout) {
  return guarded([&] {
    const recsdk::RowLayout& from = table_of(table).layout();
    const recsdk_row_layout to = {.struct_size = sizeof(to),
                                  .dim = from.dim,
                                  .stride = from.stride,
                                  .state_width = from.state_width(),
                                  .num_fields = static_cast<int64_t>(from.fields.size()),
                                  .scalar_stride = from.scalar_stride};
    write_struct(layout, to, "recsdk_row_layout");
  });
}

int recsdk_table_field(const recsdk_table* table, int64_t index, recsdk_row_field* field) {
  return guarded([&] {
    const std::vector<recsdk::RowField>& fields = table_of(table).layout().fields;
    const int64_t num_fields = static_cast<int64_t>(fields.size());
    if (index < 0 || index >= num_fields) {
      recsdk::c_api::reject_value("index", index, "at least 0 and below num_fields");
    }
    const recsdk::RowField& from = fields[static_cast<size_t>(index)];
    const recsdk_row_field to = {.struct_size = sizeof(to),
                                 .name = from.name.c_str(),
                                 .offset = from.offset,
                                 .count = from.count,
                                 .initial_value = from.initial_value,
                                 .dtype = static_cast<int32_t>(from.dtype),
                                 .place = static_cast<int32_t>(from.place),
                                 .reserved = 0};
    write_struct(field, to, "recsdk_row_field");
  });
}

int recsdk_table_lease(recsdk_table* table, int has_step, int64_t step, recsdk_lease** lease) {
  return guarded([&] { recsdk::c_api::take_lease(table_of(table), has_step, step, lease); });
}

int recsdk_lease_step(const recsdk_lease* lease, int* has_step, int64_t* step) {
  return guarded([&] {
    const std::optional<int64_t> value = deref(lease, "lease").lease.step();
    deref(step, "step");
    deref(has_step, "has_step") = value ? 1 : 0;
    if (value) *step = *value;
  });
}

void recsdk_lease_release(recsdk_lease* lease) { delete lease; }

int recsdk_table_map(recsdk_table* table, const int64_t* keys, int64_t num_keys, int insert,
                     const recsdk_lease* lease, int64_t* rows, uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).map(array(keys, num_keys, "keys"), array(rows, num_keys, "rows"),
                        outcomes_of(array(outcomes, num_keys, "outcomes")),
                        {.insert = insert != 0, .lease = lease_of(lease)});
  });
}

int recsdk_table_lookup(const recsdk_table* table, const int64_t* keys, int64_t num_keys,
                        float* values, uint8_t* outcomes) {
  return guarded([&] {
    const recsdk::Table& of = table_of(table);
    array(values, num_keys, "values");
    of.lookup(array(keys, num_keys, "keys"), values,
              outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_table_find_or_insert(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                const recsdk_lease* lease, float* values, uint8_t* outcomes) {
  return guarded([&] {
    recsdk::Table& of = table_of(table);
    array(values, num_keys, "values");
    of.find_or_insert(array(keys, num_keys, "keys"), values,
                      outcomes_of(optional_array(outcomes, num_keys, "outcomes")), lease_of(lease));
  });
}

int recsdk_table_upsert(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                        const float* values, const float* state, uint8_t* outcomes) {
  return guarded([&] {
    recsdk::Table& of = table_of(table);
    array(values, num_keys, "values");
    of.upsert(array(keys, num_keys, "keys"), values, state,
              outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_table_erase(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                       uint8_t* outcomes) {
  return guarded([&] {
    table_of(table).erase(array(keys, num_keys, "keys"),
                          outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_table_clear(recsdk_table* table) {
  return guarded([&] { table_of(table).clear(); });
}

int recsdk_table_apply_gradients(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                 const float* gradients, uint8_t* outcomes) {
  return guarded([&] {
    recsdk::Table& of = table_of(table);
    array(gradients, num_keys, "gradients");
    of.apply_gradients(array(keys, num_keys, "keys"), gradients,
                       outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_table_pool(const recsdk_table* table, const recsdk_pool_block* blocks,
                      int64_t num_blocks) {
  return guarded(
      [&] { table_of(table).pool(convert_all(blocks, num_blocks, "blocks", pool_block)); });
}

int recsdk_table_update(recsdk_table* table, const recsdk_grad_block* blocks, int64_t num_blocks) {
  return guarded(
      [&] { table_of(table).update(convert_all(blocks, num_blocks, "blocks", grad_block)); });
}

int recsdk_table_limit_norms(recsdk_table* table, const int64_t* rows, const uint8_t* outcomes,
                             int64_t num_keys, double max_norm, double norm_type,
                             int64_t* num_limited) {
  return guarded([&] {
    const std::int64_t limited = table_of(table).limit_norms(
        array(rows, num_keys, "rows"), outcomes_of(array(outcomes, num_keys, "outcomes")),
        {.max_norm = max_norm, .norm_type = norm_type});
    if (num_limited != nullptr) *num_limited = limited;
  });
}

int recsdk_table_norm_factors(const recsdk_table* table, const int64_t* rows,
                              const uint8_t* outcomes, int64_t num_keys, double max_norm,
                              double norm_type, float* factors) {
  return guarded([&] {
    array(factors, num_keys, "factors");
    table_of(table).norm_factors(array(rows, num_keys, "rows"),
                                 outcomes_of(array(outcomes, num_keys, "outcomes")),
                                 {.max_norm = max_norm, .norm_type = norm_type}, factors);
  });
}

int recsdk_table_learning_rate(const recsdk_table* table, float* learning_rate) {
  return guarded([&] { deref(learning_rate, "learning_rate") = table_of(table).learning_rate(); });
}

int recsdk_table_set_learning_rate(recsdk_table* table, float learning_rate) {
  return guarded([&] { table_of(table).set_learning_rate(learning_rate); });
}

int recsdk_table_update_count(const recsdk_table* table, uint64_t* count) {
  return guarded([&] { deref(count, "count") = table_of(table).update_count(); });
}

int recsdk_table_set_update_count(recsdk_table* table, uint64_t count) {
  return guarded([&] { table_of(table).set_update_count(count); });
}

int recsdk_table_log_decay(const recsdk_table* table, double* log_decay) {
  return guarded([&] { deref(log_decay, "log_decay") = table_of(table).log_decay(); });
}

int recsdk_table_set_log_decay(recsdk_table* table, double log_decay) {
  return guarded([&] { table_of(table).set_log_decay(log_decay); });
}

int recsdk_table_size(const recsdk_table* table, int64_t* size) {
  return guarded([&] { deref(size, "size") = table_of(table).size(); });
}

int recsdk_table_stats(const recsdk_table* table, recsdk_stats* stats) {
  return guarded([&] {
    write_struct(stats, recsdk::c_api::stats_of(table_of(table).stats()), "recsdk_stats");
  });
}

int recsdk_table_memory_bytes(const recsdk_table* table, int64_t* bytes) {
  return guarded([&] { deref(bytes, "bytes") = table_of(table).memory_bytes(); });
}

int recsdk_table_export_rows(const recsdk_table* table, int64_t* begin, int64_t capacity,
                             int64_t* keys, float* weights, float* state, int64_t* num_rows) {
  return guarded([&] {
    const recsdk::Table& of = table_of(table);
    deref(num_rows, "num_rows");
    array(keys, capacity, "keys");
    *num_rows =
        of.export_rows(deref(begin, "begin"),
                       {.capacity = capacity, .keys = keys, .weights = weights, .state = state});
  });
}

int recsdk_table_reserve(recsdk_table* table, int64_t num_rows) {
  return guarded([&] { table_of(table).reserve(num_rows); });
}

int recsdk_table_check_invariants(const recsdk_table* table) {
  return guarded([&] { table_of(table).check_invariants(); });
}

// Many tables.

int recsdk_map_tables(const recsdk_map_call* calls, int64_t num_calls) {
  return guarded([&] { recsdk::map_tables(convert_all(calls, num_calls, "calls", map_call)); });
}

int recsdk_pool_tables(const recsdk_pool_call* calls, int64_t num_calls) {
  return guarded([&] {
    const auto blocks = convert_all(calls, num_calls, "calls", [](const recsdk_pool_call& call) {
      return convert_all(call.blocks, call.num_blocks, "blocks", pool_block);
    });
    std::vector<recsdk::PoolCall> converted;
    for (size_t i = 0; i < blocks.size(); ++i) {
      converted.push_back({.table = &table_of(calls[i].table), .blocks = blocks[i]});
    }
    recsdk::pool_tables(converted);
  });
}

int recsdk_update_tables(const recsdk_update_call* calls, int64_t num_calls) {
  return guarded([&] {
    const auto blocks = convert_all(calls, num_calls, "calls", [](const recsdk_update_call& call) {
      return convert_all(call.blocks, call.num_blocks, "blocks", grad_block);
    });
    std::vector<recsdk::UpdateCall> converted;
    for (size_t i = 0; i < blocks.size(); ++i) {
      converted.push_back({.table = &table_of(calls[i].table), .blocks = blocks[i]});
    }
    recsdk::update_tables(converted);
  });
}
