#include "kernels/optimizer_step.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/scalar_math.h"
#include "util/hash.h"
#include "util/must.h"

namespace recsdk::internal {
namespace {

bool is_adam_or_kin(OptimizerKind kind) {
  return kind == OptimizerKind::kAdam || kind == OptimizerKind::kPartialRowwiseAdam ||
         kind == OptimizerKind::kLamb;
}

// Sets where the layout has the optimizer's state, as float indexes.
void place_state(const OptimizerConfig& config, const RowLayout& layout, OptimizerStep& step) {
  std::size_t num_columns = 0;
  std::size_t num_scalars = 0;
  for (std::size_t f = 1; f < layout.fields.size(); ++f) {
    const RowField& field = layout.fields[f];
    const std::int64_t index = field.offset / static_cast<std::int64_t>(sizeof(float));
    if (field.place == FieldPlace::kRecord) {
      step.columns[num_columns++] = index;
    } else if (config.catch_up && f + 1 == layout.fields.size()) {
      step.log_decay = index;
    } else {
      step.scalars[num_scalars++] = index;
    }
  }
}

void set_adam(const OptimizerConfig& config, std::uint64_t t, OptimizerStep& step) {
  step.one_minus_beta1 = static_cast<float>(1.0 - config.beta1);
  step.beta2 = static_cast<float>(config.beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - config.beta2);
  step.exact_beta1 = config.beta1;
  step.exact_beta2 = config.beta2;
  if (step.counts_rows) return;
  const double bias1 = 1.0 - power(config.beta1, t);
  step.inv_bias1 = static_cast<float>(1.0 / bias1);
  step.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - power(config.beta2, t)));
  if (config.kind != OptimizerKind::kLamb)
    step.learning_rate = static_cast<float>(static_cast<double>(config.learning_rate) / bias1);
}

void split(double value, float (&halves)[2]) {
  halves[0] = static_cast<float>(value);
  halves[1] = static_cast<float>(value - static_cast<double>(halves[0]));
}

void set_preparation(const OptimizerConfig& config, double log_decay, OptimizerStep& step) {
  constexpr float kNoLimit = std::numeric_limits<float>::infinity();
  step.clip_value = config.clip_value.value_or(kNoLimit);
  step.clip_norm = config.clip_norm.value_or(kNoLimit);
  step.decay_factor = 1.0F;
  if (config.kind == OptimizerKind::kLamb) {
    step.lamb_decay = config.weight_decay;
  } else if (config.weight_decay_mode == WeightDecay::kL2) {
    step.l2 = config.weight_decay;
  } else {
    step.decay_factor = static_cast<float>(1.0 - static_cast<double>(config.learning_rate) *
                                                     static_cast<double>(config.weight_decay));
  }
  step.catches_up = config.catch_up;
  split(log_decay, step.decay_before);
  split(next_log_decay(config, log_decay), step.decay_after);
  step.needs_preparation = config.clip_value || config.clip_norm || step.catches_up ||
                           step.l2 != 0.0F || step.decay_factor != 1.0F;
}

}  // namespace

double next_log_decay(const OptimizerConfig& config, double log_decay) {
  if (!config.catch_up) return log_decay;
  return log_decay + log_one_minus(static_cast<double>(config.learning_rate) *
                                   static_cast<double>(config.weight_decay));
}

RoundingStep make_rounding_step(Rounding rounding, std::uint64_t seed, std::uint64_t table_hash,
                                std::uint64_t t, const RowAddresses& keys) {
  constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15U;
  return {rounding, keys, mix64((mix64(seed + kStep) ^ table_hash) + t * kStep)};
}

OptimizerStep make_optimizer_step(const OptimizerConfig& config, const RowLayout& layout,
                                  NonFinite on_nonfinite, std::uint64_t t, double log_decay) {
  OptimizerStep step{};
  step.kind = config.kind;
  step.on_nonfinite = on_nonfinite;
  step.learning_rate = config.learning_rate;
  step.eps = config.eps;
  if (config.kind == OptimizerKind::kAdagrad) {
    const double slower = 1.0 + static_cast<double>(t - 1) * static_cast<double>(config.lr_decay);
    step.learning_rate = static_cast<float>(static_cast<double>(config.learning_rate) / slower);
  }
  step.counts_rows = config.bias_correction == BiasCorrection::kRow || config.dampening != 0.0;
  if (is_adam_or_kin(config.kind)) set_adam(config, t, step);
  step.has_momentum = config.momentum != 0.0F;
  step.momentum = config.momentum;
  step.one_minus_dampening = static_cast<float>(1.0 - config.dampening);
  step.is_nesterov = config.nesterov;
  step.is_centered = config.centered;
  step.alpha = static_cast<float>(config.alpha);
  step.one_minus_alpha = static_cast<float>(1.0 - config.alpha);
  step.l1 = config.l1;
  step.twice_l2 = 2.0F * config.l2;
  step.beta = config.beta;
  set_preparation(config, log_decay, step);
  place_state(config, layout, step);
  return step;
}

void check_update_count(std::uint64_t count, const std::string& title) {
  // Beyond it the next updates would count from 0 again.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  if (count > kMost) {
    throw std::invalid_argument(
        title + ": " + must("the update count", "be at most " + std::to_string(kMost), count));
  }
}

}  // namespace recsdk::internal
