// Rules by which keys come and leave, what they are given, and what leaves.
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>

#include "c_api/convert.h"
#include "recsdk/error.h"
#include "recsdk/leavers.h"
#include "recsdk/policy.h"

namespace recsdk::c_api {
namespace {

EvictFunction evict_function(recsdk_evict_function function, void* user_data) {
  return [=](const EvictColumns& from, std::span<double> places) {
    const recsdk_evict_columns columns{
        .now = from.now,
        .num_keys = std::ssize(from.steps),
        .steps = from.steps.data(),
        .times = from.times.empty() ? nullptr : from.times.data(),
        .counts = from.counts.empty() ? nullptr : from.counts.data(),
        .scores = from.scores.empty() ? nullptr : from.scores.data()};
    const int result = function(user_data, &columns, places.data());
    if (result == 0) return;
    throw Error(ErrorCode::kInternal,
                "the function of eviction returned " + std::to_string(result) + ", which is not 0");
  };
}

}  // namespace

recsdk_default_config default_row_defaults() {
  const DefaultConfig defaults;
  recsdk_default_config c{};
  c.struct_size = sizeof(c);
  c.kind = static_cast<std::int32_t>(defaults.kind);
  c.value = defaults.value;
  c.num_rows = defaults.num_rows;
  c.begin_with = static_cast<std::int32_t>(defaults.begin_with);
  return c;
}

DefaultConfig default_config(const recsdk_default_config* given) {
  DefaultConfig config;
  if (given == nullptr) return config;
  const recsdk_default_config c =
      read_struct(given, default_row_defaults(), "recsdk_default_config");
  check_reserved(c.reserved, "recsdk_default_config.reserved");
  config.kind = checked_enum(c.kind, DefaultKind::kSharedRows, "recsdk_default_config.kind");
  if (config.kind == DefaultKind::kConstant) config.value = c.value;
  if (config.kind != DefaultKind::kSharedRows) return config;
  config.num_rows = c.num_rows;
  config.begin_with =
      checked_enum(c.begin_with, BeginWith::kSharedRow, "recsdk_default_config.begin_with");
  return config;
}

recsdk_evict_config evict_defaults() {
  recsdk_evict_config c{};
  c.struct_size = sizeof(c);
  const EvictConfig defaults;
  c.expire_every = defaults.expire_every;
  c.alpha = defaults.alpha;
  c.beta = defaults.beta;
  c.decay = defaults.decay;
  c.churn_records = defaults.churn_records;
  return c;
}

recsdk_admit_config admit_defaults() {
  recsdk_admit_config c{};
  c.struct_size = sizeof(c);
  return c;
}

recsdk_leavers_options leavers_defaults() {
  const LeaversOptions defaults;
  recsdk_leavers_options c{};
  c.struct_size = sizeof(c);
  c.max_rows = defaults.max_rows;
  c.block_seconds = defaults.block_seconds;
  c.on_overflow = static_cast<std::int32_t>(defaults.on_overflow);
  return c;
}

std::optional<EvictConfig> evict_config(const recsdk_evict_config* given) {
  if (given == nullptr) return std::nullopt;
  const recsdk_evict_config c = read_struct(given, evict_defaults(), "recsdk_evict_config");
  EvictConfig config;
  config.order = checked_enum(c.order, EvictOrder::kShowClickTotals, "recsdk_evict_config.order");
  config.clock = checked_enum(c.clock, EvictClock::kTime, "recsdk_evict_config.clock");
  if (c.has_half_life != 0) config.half_life = c.half_life;
  config.min_age = c.min_age;
  config.expire_every = c.expire_every;
  config.alpha = c.alpha;
  config.beta = c.beta;
  config.decay = c.decay;
  if (c.has_ttl != 0) config.ttl = c.ttl;
  if (c.has_rare_ttl != 0) {
    config.rare_ttl = c.rare_ttl;
    config.rare_count = c.rare_count;
  }
  if (c.share != 0.0) config.share = c.share;
  if (c.churn_steps != 0) config.churn_steps = c.churn_steps;
  config.churn_records = c.churn_records;
  if (c.below != 0.0) config.below = c.below;
  config.keeps_counts = c.keeps_counts != 0;
  config.keeps_scores = c.keeps_scores != 0;
  config.ignores_now = c.ignores_now != 0;
  if (c.function != nullptr) config.function = evict_function(c.function, c.function_data);
  return config;
}

std::optional<AdmitConfig> admit_config(const recsdk_admit_config* given) {
  if (given == nullptr) return std::nullopt;
  const recsdk_admit_config c = read_struct(given, admit_defaults(), "recsdk_admit_config");
  AdmitConfig config;
  for (const recsdk_admit_term& term : array(c.rule, c.num_terms, "recsdk_admit_config.rule")) {
    check_reserved(term.reserved, "recsdk_admit_term.reserved");
    config.rule.push_back({.kind = checked_enum(term.kind, AdmitTerm::Kind::kShowClickOfStep,
                                                "recsdk_admit_term.kind"),
                           .count = term.count,
                           .probability = term.probability,
                           .alpha = term.alpha,
                           .beta = term.beta,
                           .threshold = term.threshold});
  }
  if (c.has_max_records != 0) config.max_records = c.max_records;
  if (c.has_max_bytes != 0) config.max_bytes = c.max_bytes;
  config.salt = c.salt;
  return config;
}

recsdk_clock clock_of(const EvictionState& state) {
  return {.struct_size = sizeof(recsdk_clock),
          .step = state.step,
          .lease_step = state.lease_step.value_or(0),
          .time = state.time.value_or(0),
          .is_begun = state.is_begun ? 1 : 0,
          .has_lease_step = state.lease_step ? 1 : 0,
          .has_time = state.time ? 1 : 0,
          .reserved = 0};
}

EvictionState eviction_state(const recsdk_clock* given) {
  const recsdk_clock c = read_struct(given, clock_of({}), "recsdk_clock");
  check_reserved(c.reserved, "recsdk_clock.reserved");
  EvictionState state{.step = c.step, .lease_step = {}, .is_begun = c.is_begun != 0, .time = {}};
  if (c.has_lease_step != 0) state.lease_step = c.lease_step;
  if (c.has_time != 0) state.time = c.time;
  return state;
}

LeaversOptions leavers_options(const recsdk_leavers_options* given) {
  if (given == nullptr) return {};
  const recsdk_leavers_options c = read_struct(given, leavers_defaults(), "recsdk_leavers_options");
  check_reserved(c.reserved, "recsdk_leavers_options.reserved");
  return {.max_rows = c.max_rows,
          .on_overflow =
              checked_enum(c.on_overflow, OnOverflow::kRaise, "recsdk_leavers_options.on_overflow"),
          .block_seconds = c.block_seconds};
}

KeyData key_data(const recsdk_key_data* data, std::int64_t num_keys) {
  if (data == nullptr) return {};
  check_reserved(data->reserved, "recsdk_key_data.reserved");
  return {.times = optional_array(data->times, data->num_times, "recsdk_key_data.times"),
          .scores = optional_array(data->scores, num_keys, "recsdk_key_data.scores"),
          .counts = optional_array(data->counts, data->num_counts, "recsdk_key_data.counts"),
          .clicks = optional_array(data->clicks, data->num_clicks, "recsdk_key_data.clicks"),
          .now = data->has_now != 0 ? std::optional(data->now) : std::nullopt};
}

}  // namespace recsdk::c_api
