// Tables, indexes and calls over many. Rules by which keys come and leave are in
// convert_policies.cc.
#include "c_api/convert.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "util/must.h"

namespace recsdk::c_api {
namespace {

OptimizerConfig default_optimizer(std::int32_t kind) {
  switch (checked_enum(kind, OptimizerKind::kRmsprop, "kind")) {
    case OptimizerKind::kSgd:
      return OptimizerConfig::sgd();
    case OptimizerKind::kAdagrad:
      return OptimizerConfig::adagrad();
    case OptimizerKind::kRowwiseAdagrad:
      return OptimizerConfig::rowwise_adagrad();
    case OptimizerKind::kAdam:
      return OptimizerConfig::adam();
    case OptimizerKind::kPartialRowwiseAdam:
      return OptimizerConfig::partial_rowwise_adam();
    case OptimizerKind::kLamb:
      return OptimizerConfig::lamb();
    case OptimizerKind::kFtrl:
      return OptimizerConfig::ftrl();
    case OptimizerKind::kRmsprop:
      return OptimizerConfig::rmsprop();
  }
  reject_value("kind", kind, "one of recsdk_optimizer_kind");
}

OptimizerConfig optimizer_config(const recsdk_optimizer_config* given) {
  constexpr const char* kType = "recsdk_optimizer_config";
  const std::int32_t kind = read_struct(given, {}, kType).kind;
  checked_enum(kind, OptimizerKind::kRmsprop, "recsdk_optimizer_config.kind");
  const recsdk_optimizer_config c = read_struct(given, optimizer_defaults(kind), kType);
  check_reserved(c.reserved, "recsdk_optimizer_config.reserved");
  OptimizerConfig config;
  config.kind = static_cast<OptimizerKind>(kind);
  config.learning_rate = c.learning_rate;
  config.eps = c.eps;
  config.beta1 = c.beta1;
  config.beta2 = c.beta2;
  config.lr_decay = c.lr_decay;
  config.initial_accumulator_value = c.initial_accumulator_value;
  config.weight_decay = c.weight_decay;
  config.bias_correction = checked_enum(c.bias_correction, BiasCorrection::kRow,
                                        "recsdk_optimizer_config.bias_correction");
  config.weight_decay_mode = checked_enum(c.weight_decay_mode, WeightDecay::kDecoupled,
                                          "recsdk_optimizer_config.weight_decay_mode");
  config.dampening = c.dampening;
  config.alpha = c.alpha;
  config.momentum = c.momentum;
  config.l1 = c.l1;
  config.l2 = c.l2;
  config.beta = c.beta;
  if (c.has_clip_value != 0) config.clip_value = c.clip_value;
  if (c.has_clip_norm != 0) config.clip_norm = c.clip_norm;
  config.nesterov = c.nesterov != 0;
  config.centered = c.centered != 0;
  config.catch_up = c.catch_up != 0;
  return config;
}

RowCallback row_callback(const recsdk_initializer_config& c, std::int64_t dim) {
  if (c.callback == nullptr) reject_null("recsdk_initializer_config.callback");
  return
      [call = c.callback, user_data = c.user_data, dim](std::span<const Key> keys, float* values) {
        const std::int64_t num_keys = static_cast<std::int64_t>(keys.size());
        const int status = call(user_data, keys.data(), num_keys, dim, values);
        if (status != 0) {
          throw Error(ErrorCode::kInternal,
                      "the initializer's callback returned " + std::to_string(status) + ", not 0");
        }
      };
}

Bags bags(const recsdk_bags& c) {
  check_reserved(c.reserved, "recsdk_bags.reserved");
  Bags bags;
  bags.rows = array(c.rows, c.num_keys, "recsdk_bags.rows");
  bags.outcomes = outcomes_of(array(c.outcomes, c.num_keys, "recsdk_bags.outcomes"));
  bags.weights = optional_array(c.weights, c.num_keys, "recsdk_bags.weights");
  bags.pooling = checked_enum(c.pooling, Pooling::kMean, "recsdk_bags.pooling");
  check_count("recsdk_bags.num_bags", c.num_bags, sizeof(std::int64_t));
  if (c.offsets != nullptr) {
    bags.offsets = {c.offsets, static_cast<std::size_t>(c.num_bags) + 1};
  } else if (c.num_bags != c.num_keys) {
    reject_value("recsdk_bags.num_bags", c.num_bags, "num_keys, because offsets is null");
  }
  return bags;
}

}  // namespace

void reject_null(const char* name) {
  throw std::invalid_argument(std::string(name) + " must not be null");
}

void reject_count(const char* name, std::int64_t count, std::int64_t most) {
  const std::string what =
      count < 0 ? "not be negative" : "be that of an array, at most " + std::to_string(most);
  throw std::invalid_argument(internal::must("the length of " + std::string(name), what, count));
}

void reject_struct_size(const char* type, std::size_t got, std::size_t known) {
  throw std::invalid_argument(internal::must(std::string(type) + ".struct_size",
                                             "be sizeof(" + std::string(type) +
                                                 "), of which this library knows up to " +
                                                 std::to_string(known),
                                             got) +
                              "; use a library at least as new as the header");
}

void reject_value(const char* name, std::int64_t value, const char* allowed) {
  throw std::invalid_argument(internal::must(name, "be " + std::string(allowed), value));
}

recsdk_optimizer_config optimizer_defaults(std::int32_t kind) {
  const OptimizerConfig defaults = default_optimizer(kind);
  recsdk_optimizer_config c{};
  c.struct_size = sizeof(c);
  c.kind = kind;
  c.learning_rate = defaults.learning_rate;
  c.beta1 = defaults.beta1;
  c.beta2 = defaults.beta2;
  c.eps = defaults.eps;
  c.weight_decay = defaults.weight_decay;
  c.lr_decay = defaults.lr_decay;
  c.initial_accumulator_value = defaults.initial_accumulator_value;
  c.bias_correction = static_cast<std::int32_t>(defaults.bias_correction);
  c.weight_decay_mode = static_cast<std::int32_t>(defaults.weight_decay_mode);
  c.dampening = defaults.dampening;
  c.alpha = defaults.alpha;
  c.momentum = defaults.momentum;
  c.l1 = defaults.l1;
  c.l2 = defaults.l2;
  c.beta = defaults.beta;
  return c;
}

recsdk_initializer_config initializer_defaults() {
  const InitializerConfig defaults;
  recsdk_initializer_config c{};
  c.struct_size = sizeof(c);
  c.kind = static_cast<std::int32_t>(defaults.kind);
  c.value = defaults.value;
  c.low = defaults.low;
  c.high = defaults.high;
  c.mean = defaults.mean;
  c.stddev = defaults.stddev;
  return c;
}

recsdk_table_config table_defaults() {
  const TableConfig defaults;
  recsdk_table_config c{};
  c.struct_size = sizeof(c);
  c.name = "table";
  c.seed = defaults.seed;
  c.on_nonfinite = static_cast<std::int32_t>(defaults.on_nonfinite);
  return c;
}

recsdk_index_config index_defaults() {
  recsdk_index_config c{};
  c.struct_size = sizeof(c);
  c.name = "index";
  return c;
}

InitializerConfig initializer_config(const recsdk_initializer_config* given, std::int64_t dim) {
  const recsdk_initializer_config c =
      read_struct(given, initializer_defaults(), "recsdk_initializer_config");
  InitializerConfig config;
  config.kind = checked_enum(c.kind, InitializerKind::kCustom, "recsdk_initializer_config.kind");
  config.value = c.value;
  config.low = c.low;
  config.high = c.high;
  config.mean = c.mean;
  config.stddev = c.stddev;
  if (config.kind == InitializerKind::kCustom) config.callback = row_callback(c, dim);
  return config;
}

TableConfig table_config(const recsdk_table_config* given) {
  const recsdk_table_config c = read_struct(given, table_defaults(), "recsdk_table_config");
  TableConfig config;
  config.dim = c.dim;
  config.name = &deref(c.name, "recsdk_table_config.name");
  config.optimizer = OptimizerConfig::sgd();
  if (c.optimizer != nullptr) config.optimizer = optimizer_config(c.optimizer);
  if (c.initializer != nullptr) config.initializer = initializer_config(c.initializer, c.dim);
  config.seed = c.seed;
  if (c.has_hash_seed != 0) config.hash_seed = c.hash_seed;
  if (c.has_max_rows != 0) config.max_rows = c.max_rows;
  if (c.has_eviction_groups != 0) config.eviction_groups = c.eviction_groups;
  if (c.has_owned_groups != 0) config.owned_groups = GroupRange{c.owned_begin, c.owned_end};
  config.default_row = default_config(c.default_row);
  config.on_nonfinite =
      checked_enum(c.on_nonfinite, NonFinite::kSkip, "recsdk_table_config.on_nonfinite");
  if (c.has_num_threads != 0) config.num_threads = c.num_threads;
  config.weight_dtype =
      checked_enum(c.weight_dtype, DType::kFloat16, "recsdk_table_config.weight_dtype");
  config.rounding = checked_enum(c.rounding, Rounding::kNearest, "recsdk_table_config.rounding");
  config.on_full = checked_enum(c.on_full, OnFull::kRaise, "recsdk_table_config.on_full");
  config.eviction = evict_config(c.eviction);
  config.admission = admit_config(c.admission);
  return config;
}

IndexConfig index_config(const recsdk_index_config& c) {
  IndexConfig config;
  config.name = &deref(c.name, "recsdk_index_config.name");
  if (c.has_hash_seed != 0) config.hash_seed = c.hash_seed;
  if (c.has_max_rows != 0) config.max_rows = c.max_rows;
  if (c.has_eviction_groups != 0) config.eviction_groups = c.eviction_groups;
  if (c.has_owned_groups != 0) config.owned_groups = GroupRange{c.owned_begin, c.owned_end};
  if (c.has_num_threads != 0) config.num_threads = c.num_threads;
  config.on_full = checked_enum(c.on_full, OnFull::kRaise, "recsdk_index_config.on_full");
  config.eviction = evict_config(c.eviction);
  config.admission = admit_config(c.admission);
  config.default_row = default_config(c.default_row);
  if (c.has_record_groups != 0) config.record_groups = c.record_groups;
  return config;
}

recsdk_stats stats_of(const TableStats& from) {
  recsdk_stats to = {.struct_size = sizeof(to),
                     .num_rows = from.num_rows,
                     .num_rows_in_flight = from.num_rows_in_flight,
                     .outcomes = {},
                     .erased = from.erased,
                     .updates = from.updates,
                     .nonfinite = from.nonfinite,
                     .index_bytes = from.index_bytes,
                     .row_bytes = from.row_bytes,
                     .metadata_bytes = from.metadata_bytes,
                     .index_slots = from.index_slots,
                     .index_segments = from.index_segments,
                     .index_crowded = from.index_crowded,
                     .index_directory = from.index_directory,
                     .index_splits = from.index_splits,
                     .index_overflowed = from.index_overflowed,
                     .index_probes = from.index_probes,
                     .index_dense_keys = from.index_dense_keys,
                     .index_dense_pages = from.index_dense_pages,
                     .tracking_bytes = from.tracking_bytes,
                     .checkpoint_copied_bytes = from.checkpoint_copied_bytes,
                     .checkpoint_waits = from.checkpoint_waits,
                     .checkpoint_wait_seconds = from.checkpoint_wait_seconds,
                     .evicted = from.evicted,
                     .expired = from.expired,
                     .returned = from.returned,
                     .churn_lost = from.churn_lost,
                     .admission_records = from.admission_records,
                     .records_lost = from.records_lost,
                     .num_rows_held_back = from.num_rows_held_back};
  std::copy_n(from.outcomes, RECSDK_NUM_OUTCOMES, to.outcomes);
  return to;
}

template <typename To, typename From>
To mapping_of(const From& c, const char* reserved) {
  check_reserved(c.reserved, reserved);
  To call;
  call.keys = array(c.keys, c.num_keys, "keys");
  call.rows = array(c.rows, c.num_keys, "rows");
  call.outcomes = outcomes_of(array(c.outcomes, c.num_keys, "outcomes"));
  call.options = {.insert = c.insert != 0, .lease = lease_of(c.lease)};
  return call;
}

IndexMapCall index_map_call(const recsdk_index_map_call& c) {
  auto call = mapping_of<IndexMapCall>(c, "recsdk_index_map_call.reserved");
  call.index = &deref(c.index, "index").index;
  return call;
}

MapCall map_call(const recsdk_map_call& c) {
  auto call = mapping_of<MapCall>(c, "recsdk_map_call.reserved");
  call.table = &deref(c.table, "table").table;
  return call;
}

PoolBlock pool_block(const recsdk_pool_block& c) {
  PoolBlock block{.bags = bags(c.bags), .out = c.out, .stride = c.stride};
  if (c.out == nullptr && block.bags.num_bags() > 0) reject_null("recsdk_pool_block.out");
  return block;
}

GradBlock grad_block(const recsdk_grad_block& c) {
  GradBlock block{
      .bags = bags(c.bags), .grad = c.grad, .stride = c.stride, .weights_grad = c.weights_grad};
  if (c.grad == nullptr && block.bags.num_bags() > 0) reject_null("recsdk_grad_block.grad");
  return block;
}

}  // namespace recsdk::c_api
