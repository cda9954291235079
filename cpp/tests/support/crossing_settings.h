// Every setting of a table with the values that are crossed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "covering.h"
#include "recsdk/recsdk.h"

namespace recsdk::test {

/// What one run of the crossing is about.
struct Combination {
  TableConfig table;
  std::string isa;
  bool into_used = false;     ///< what is restored goes into a table that has rows
  bool with_changes = false;  ///< a save of changes follows that of the whole
};

struct Value {
  std::string name;
  std::function<void(Combination&)> set;
};
using Values = std::vector<Value>;
struct Setting {
  std::string name;
  Values values;
};

inline constexpr std::int64_t kFewRows = 700;

/// A setting whose values are assigned to the field that `field` gives.
template <typename Field, typename Choice>
Values assigned(Field field, std::initializer_list<Choice> choices) {
  Values values;
  for (const Choice& choice : choices) {
    values.push_back({"#" + std::to_string(values.size()),
                      [field, choice](Combination& row) { field(row) = choice; }});
  }
  return values;
}

inline Value form(const std::string& name, const OptimizerConfig& config,
                  const std::function<void(OptimizerConfig&)>& change = {}) {
  return {name, [config, change](Combination& row) {
            row.table.optimizer = config;
            if (change) change(row.table.optimizer);
          }};
}

/// Each optimizer, with each of its numbers other than by default in one form.
inline Values optimizers() {
  const auto by_row = [](OptimizerConfig& c) { c.bias_correction = BiasCorrection::kRow; };
  return {
      form("sgd", OptimizerConfig::sgd(0.1F)),
      form("momentum", OptimizerConfig::sgd(0.1F),
           [](auto& c) {
             c.momentum = 0.7F;
             c.dampening = 0.4;
           }),
      form("nesterov", OptimizerConfig::sgd(0.1F),
           [](auto& c) {
             c.momentum = 0.7F;
             c.nesterov = true;
           }),
      form("adagrad", OptimizerConfig::adagrad(0.1F, 1e-3F),
           [](auto& c) {
             c.lr_decay = 0.3F;
             c.initial_accumulator_value = 0.2F;
           }),
      form("rowwise", OptimizerConfig::rowwise_adagrad(0.1F, 1e-3F),
           [](auto& c) { c.initial_accumulator_value = 0.2F; }),
      form("adam", OptimizerConfig::adam(0.02F, 0.8, 0.95, 1e-3F)),
      form("adam_by_row", OptimizerConfig::adam(0.02F, 0.4, 0.9, 1e-3F), by_row),
      form("partial", OptimizerConfig::partial_rowwise_adam(0.02F, 0.3, 0.8, 1e-3F)),
      form("partial_by_row", OptimizerConfig::partial_rowwise_adam(0.02F), by_row),
      form("lamb", OptimizerConfig::lamb(0.02F)),
      form("lamb_by_row", OptimizerConfig::lamb(0.02F, 0.4, 0.9, 1e-3F), by_row),
      form("ftrl", OptimizerConfig::ftrl(0.2F),
           [](auto& c) {
             c.l1 = 0.3F;
             c.l2 = 0.2F;
             c.beta = 0.5F;
             c.initial_accumulator_value = 0.3F;
           }),
      form("rmsprop", OptimizerConfig::rmsprop(0.02F)),
      form("rmsprop_all", OptimizerConfig::rmsprop(0.02F, 0.8, 1e-2F),
           [](auto& c) {
             c.momentum = 0.6F;
             c.centered = true;
           }),
  };
}

inline Value decay(const std::string& name, WeightDecay mode, bool catch_up) {
  return {name, [mode, catch_up](Combination& row) {
            row.table.optimizer.weight_decay = 0.4F;
            row.table.optimizer.weight_decay_mode = mode;
            row.table.optimizer.catch_up = catch_up;
          }};
}

inline Values decays() {
  return {{"none", [](Combination&) {}},
          decay("l2", WeightDecay::kL2, false),
          decay("decoupled", WeightDecay::kDecoupled, false),
          decay("l2_catch_up", WeightDecay::kL2, true),
          decay("decoupled_catch_up", WeightDecay::kDecoupled, true)};
}

inline Values clips() {
  const auto by_value = [](Combination& row) { row.table.optimizer.clip_value = 0.75F; };
  const auto by_norm = [](Combination& row) { row.table.optimizer.clip_norm = 1.5F; };
  return {{"none", [](Combination&) {}},
          {"value", by_value},
          {"norm", by_norm},
          {"both", [=](Combination& row) {
             by_value(row);
             by_norm(row);
           }}};
}

/// A row callback; `dim` must be set before.
inline void set_custom(Combination& row) {
  const auto fill = [dim = row.table.dim](std::span<const Key> keys, float* values) {
    for (const Key key : keys) {
      for (std::int64_t d = 0; d < dim; ++d)
        *values++ = static_cast<float>(key % 1000 + d) / 700.0F;
    }
  };
  row.table.initializer = InitializerConfig::custom(fill);
}

inline Values initializers() {
  const auto known = [](const std::string& name, const InitializerConfig& config) {
    return Value{name, [config](Combination& row) { row.table.initializer = config; }};
  };
  return {known("constant", InitializerConfig::constant(0.25F)),
          known("uniform", InitializerConfig::uniform(-1.0F, 2.0F)),
          known("normal", InitializerConfig::normal(0.5F, 0.25F)),
          known("truncated", InitializerConfig::truncated_normal(0.1F, 1.0F, -1.0F, 1.5F)),
          {"custom", set_custom}};
}

inline void place_by_count(const EvictColumns& columns, std::span<double> places) {
  std::transform(columns.counts.begin(), columns.counts.end(), places.begin(),
                 [](std::int64_t count) { return static_cast<double>(count); });
}

/// Groups have room for all keys of a round, since the first calls must fit. Who leaves a full
/// table stands here, since it needs one.
inline Values rooms() {
  const auto leaving = [](const std::string& name, const EvictConfig& config) {
    return Value{name, [config](Combination& row) {
                   row.table.max_rows = kFewRows;
                   row.table.eviction = config;
                 }};
  };
  const auto in_groups = [](Combination& row) {
    row.table.max_rows = 4 * kFewRows;
    row.table.eviction_groups = 4;
  };
  return {{"none", [](Combination&) {}},
          {"few", [](Combination& row) { row.table.max_rows = kFewRows; }},
          {"groups", in_groups},
          {"owned",
           [=](Combination& row) {
             in_groups(row);
             row.table.owned_groups = GroupRange{0, 4};
           }},
          leaving("lru", {.order = EvictOrder::kLru, .churn_steps = 2, .churn_records = 8}),
          leaving("lfu", {.order = EvictOrder::kLfu, .half_life = 2.0, .min_age = 1}),
          leaving("shows", {.order = EvictOrder::kShowClick, .alpha = 0.5, .decay = 0.75}),
          leaving("totals", {.order = EvictOrder::kShowClickTotals, .alpha = 0.5, .decay = 0.75}),
          leaving("norm", {.order = EvictOrder::kLowNorm, .expire_every = 2}),
          leaving("function", {.order = EvictOrder::kFunction,
                               .expire_every = 2,
                               .function = place_by_count,
                               .keeps_counts = true}),
          leaving("columns", {.order = EvictOrder::kFunction,
                              .expire_every = 2,
                              .function = place_by_count,
                              .keeps_counts = true,
                              .ignores_now = true})};
}

/// Rounds see most keys twice or more.
inline Values admissions() {
  using Kind = AdmitTerm::Kind;
  const auto rule = [](const std::string& name, const AdmitConfig& config) {
    return Value{name, [config](Combination& row) { row.table.admission = config; }};
  };
  const AdmitTerm twice{.kind = Kind::kCount, .count = 2};
  const AdmitTerm shown{.kind = Kind::kShowClick, .alpha = 0.5, .threshold = 1.0};
  const AdmitTerm of_step{.kind = Kind::kShowClickOfStep, .alpha = 0.5, .threshold = 1.0};
  const AdmitTerm some{.kind = Kind::kProbability, .probability = 0.3};
  return {{"none", [](Combination&) {}},
          rule("count", {.rule = {twice}, .max_records = 100}),
          rule("shows", {.rule = {shown}, .max_records = 100}),
          rule("of_step", {.rule = {of_step}}),
          rule("sketch", {.rule = {{.kind = Kind::kCountSketch, .count = 2}},
                          .max_bytes = kFewestSketchBytes}),
          rule("any", {.rule = {twice, some, {.kind = Kind::kAny}}})};
}

inline Values defaults() {
  const auto reads = [](const char* name, DefaultConfig config) {
    return Value{name, [=](Combination& row) { row.table.default_row = config; }};
  };
  return {reads("zeros", {}),
          reads("constant", {DefaultKind::kConstant, -1.5F}),
          reads("initial", {DefaultKind::kInitialRow}),
          reads("shared", {DefaultKind::kSharedRows, 0.0F, 1}),
          reads("shared_8", {DefaultKind::kSharedRows, 0.0F, 8}),
          reads("begin_shared", {DefaultKind::kSharedRows, 0.0F, 8, BeginWith::kSharedRow})};
}

/// In the order in which they are to be set.
inline const std::vector<Setting>& settings() {
  using Threads = std::optional<int>;
  using HashSeed = std::optional<std::uint64_t>;
  constexpr std::uint64_t kLargestSeed = std::numeric_limits<std::uint64_t>::max();
  static const std::vector<Setting> all = {
      {"dim", assigned([](auto& r) -> auto& { return r.table.dim; }, {1, 3, 17, 64})},
      {"name", assigned([](auto& r) -> auto& { return r.table.name; }, {"table", "a b/.%"})},
      {"optimizer", optimizers()},
      {"decay", decays()},
      {"clip", clips()},
      {"initializer", initializers()},
      {"seed",
       assigned([](auto& r) -> auto& { return r.table.seed; }, {std::uint64_t{0}, kLargestSeed})},
      {"hash_seed",
       assigned([](auto& r) -> auto& { return r.table.hash_seed; }, {HashSeed(), HashSeed(7)})},
      {"room", rooms()},
      {"admission", admissions()},
      {"on_full", assigned([](auto& r) -> auto& { return r.table.on_full; },
                           {OnFull::kRefuse, OnFull::kRaise})},
      {"default_row", defaults()},
      {"on_nonfinite", assigned([](auto& r) -> auto& { return r.table.on_nonfinite; },
                                {NonFinite::kApply, NonFinite::kRaise, NonFinite::kSkip})},
      {"weight_dtype", assigned([](auto& r) -> auto& { return r.table.weight_dtype; },
                                {DType::kFloat32, DType::kBFloat16, DType::kFloat16})},
      {"rounding", assigned([](auto& r) -> auto& { return r.table.rounding; },
                            {Rounding::kStochastic, Rounding::kNearest})},
      {"num_threads", assigned([](auto& r) -> auto& { return r.table.num_threads; },
                               {Threads(), Threads(1), Threads(3)})},
      {"isa",
       [] {
         Values isas;
         for (const std::string& name : available_isas())
           isas.push_back({name, [name](Combination& row) { row.isa = name; }});
         return isas;
       }()},
      {"into_used", assigned([](auto& r) -> auto& { return r.into_used; }, {false, true})},
      {"with_changes", assigned([](auto& r) -> auto& { return r.with_changes; }, {false, true})},
  };
  return all;
}

inline Combination made_of(const Choices& choices) {
  Combination made;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (choices[i]) settings()[i].values[*choices[i]].set(made);
  }
  return made;
}

inline std::string title_of(const Choices& choices) {
  std::string title;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const Setting& setting = settings()[i];
    if (choices[i]) title += setting.name + "=" + setting.values[*choices[i]].name + " ";
  }
  return title;
}

/// Whether an optimizer's kind and its weight decay go together.
inline bool is_legal(const OptimizerConfig& c) {
  const bool is_decoupled = c.weight_decay_mode == WeightDecay::kDecoupled;
  if (c.kind == OptimizerKind::kFtrl) return c.weight_decay == 0.0F;
  if (c.kind == OptimizerKind::kLamb && is_decoupled) return false;
  const bool is_plain_sgd = c.kind == OptimizerKind::kSgd && c.momentum == 0.0F;
  return !c.catch_up || is_decoupled || is_plain_sgd;
}

/// Whether a device table has all of it.
inline bool is_of_devices(const TableConfig& config) {
  const OptimizerConfig& c = config.optimizer;
  const bool is_known = c.kind == OptimizerKind::kSgd || c.kind == OptimizerKind::kAdagrad ||
                        c.kind == OptimizerKind::kRowwiseAdagrad || c.kind == OptimizerKind::kAdam;
  return is_known && c.bias_correction == BiasCorrection::kTable && c.dampening == 0.0 &&
         !c.catch_up && !c.clip_value && !c.clip_norm && config.weight_dtype == DType::kFloat32 &&
         config.default_row.kind == DefaultKind::kConstant &&
         config.on_nonfinite == NonFinite::kApply && !config.eviction_groups && !config.eviction &&
         !config.admission;
}

inline std::vector<Choices> combinations(const std::function<bool(const TableConfig&)>& rule) {
  std::vector<std::size_t> sizes;
  for (const Setting& setting : settings()) sizes.push_back(setting.values.size());
  const auto rule_of_choices = [&](const Choices& choices) {
    const TableConfig config = made_of(choices).table;
    return is_legal(config.optimizer) && rule(config);
  };
  return Covering(sizes, rule_of_choices).combinations();
}

// ---- the fields: one that is new breaks the build here, and then the test that each is crossed --

inline auto fields_of(const TableConfig& config) {
  const auto& [dim, name, optimizer, initializer, seed, hash_seed, max_rows, eviction_groups,
               owned_groups, on_full, default_row, on_nonfinite, weight_dtype, rounding,
               num_threads, eviction, admission] = config;
  return std::make_tuple(dim, name, seed, hash_seed, max_rows, eviction_groups, owned_groups,
                         on_full, default_row.kind, default_row.value, default_row.num_rows,
                         default_row.begin_with, on_nonfinite, weight_dtype, rounding, num_threads,
                         eviction.has_value(), admission.has_value());
}

inline auto fields_of(const OptimizerConfig& config) {
  const auto& [kind, learning_rate, eps, beta1, beta2, lr_decay, initial_accumulator_value,
               bias_correction, momentum, dampening, nesterov, alpha, centered, l1, l2, beta,
               weight_decay, weight_decay_mode, catch_up, clip_value, clip_norm] = config;
  return std::make_tuple(kind, learning_rate, eps, beta1, beta2, lr_decay,
                         initial_accumulator_value, bias_correction, momentum, dampening, nesterov,
                         alpha, centered, l1, l2, beta, weight_decay, weight_decay_mode, catch_up,
                         clip_value, clip_norm);
}

inline auto fields_of(const InitializerConfig& config) {
  const auto& [kind, value, low, high, mean, stddev, callback] = config;
  return std::make_tuple(kind, value, low, high, mean, stddev, static_cast<bool>(callback));
}

}  // namespace recsdk::test
