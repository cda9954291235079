#include "recsdk/optimizer.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "embedding/adam_bias.h"
#include "embedding/optimizer_step.h"
#include "util/number_text.h"

namespace recsdk {
namespace {

[[noreturn]] void refuse(const char* name, double value, const char* remedy) {
  throw std::invalid_argument(std::string("optimizer: ") + name + " is " +
                              internal::number_text(value) + "; " + remedy);
}

void require_not_negative(const char* name, float value) {
  // Written so that a NaN is refused as well.
  if (!(value >= 0.0F) || !std::isfinite(value))
    refuse(name, static_cast<double>(value), "pass a finite number >= 0");
}

void require_below_one(const char* name, double value) {
  if (!(value >= 0.0) || !(value < 1.0)) refuse(name, value, "pass a number >= 0 and < 1");
}

void require_unset(const char* name, float value, const char* users) {
  if (value != 0.0F) refuse(name, static_cast<double>(value), users);
}

}  // namespace

OptimizerConfig OptimizerConfig::sgd(float learning_rate) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kSgd;
  config.learning_rate = learning_rate;
  return config;
}

OptimizerConfig OptimizerConfig::adagrad(float learning_rate, float eps) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kAdagrad;
  config.learning_rate = learning_rate;
  config.eps = eps;
  return config;
}

OptimizerConfig OptimizerConfig::rowwise_adagrad(float learning_rate, float eps) {
  OptimizerConfig config = adagrad(learning_rate, eps);
  config.kind = OptimizerKind::kRowwiseAdagrad;
  return config;
}

OptimizerConfig OptimizerConfig::adam(float learning_rate, double beta1, double beta2, float eps) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kAdam;
  config.learning_rate = learning_rate;
  config.beta1 = beta1;
  config.beta2 = beta2;
  config.eps = eps;
  return config;
}

void OptimizerConfig::validate() const {
  if (kind > OptimizerKind::kAdam)
    refuse("kind", static_cast<double>(kind), "pass one of OptimizerKind");
  if (bias_correction > BiasCorrection::kRow) {
    refuse("bias_correction", static_cast<double>(bias_correction), "pass one of BiasCorrection");
  }
  require_not_negative("learning_rate", learning_rate);
  require_not_negative("eps", eps);
  require_not_negative("weight_decay", weight_decay);
  require_not_negative("lr_decay", lr_decay);
  require_not_negative("initial_accumulator_value", initial_accumulator_value);
  require_below_one("beta1", beta1);
  require_below_one("beta2", beta2);
  if (kind != OptimizerKind::kAdagrad)
    require_unset("lr_decay", lr_decay, "only Adagrad has it: leave it 0");
  if (kind != OptimizerKind::kAdagrad && kind != OptimizerKind::kRowwiseAdagrad) {
    require_unset("initial_accumulator_value", initial_accumulator_value,
                  "only Adagrad and rowwise Adagrad have it: leave it 0");
  }
  if (kind != OptimizerKind::kAdam && bias_correction != BiasCorrection::kTable) {
    refuse("bias_correction", static_cast<double>(bias_correction),
           "only Adam has it: leave it BiasCorrection::kTable");
  }
}

namespace internal {

OptimizerStep make_optimizer_step(const OptimizerConfig& config, const RowLayout& layout,
                                  NonFinite on_nonfinite, std::uint64_t t) {
  OptimizerStep step{};
  step.kind = config.kind;
  step.on_nonfinite = on_nonfinite;
  step.bias_correction = config.bias_correction;
  step.eps = config.eps;
  step.weight_decay = config.weight_decay;
  step.one_minus_beta1 = static_cast<float>(1.0 - config.beta1);
  step.beta2 = static_cast<float>(config.beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - config.beta2);
  step.exact_beta1 = config.beta1;
  step.exact_beta2 = config.beta2;
  double rate = static_cast<double>(config.learning_rate);
  if (config.kind == OptimizerKind::kAdagrad)
    rate /= 1.0 + static_cast<double>(t - 1) * static_cast<double>(config.lr_decay);
  if (config.kind == OptimizerKind::kAdam && config.bias_correction == BiasCorrection::kTable) {
    rate /= 1.0 - power(config.beta1, t);
    step.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - power(config.beta2, t)));
  }
  step.learning_rate = static_cast<float>(rate);
  const auto field = [&](std::size_t i) {
    return i < layout.fields.size()
               ? layout.fields[i].offset / static_cast<std::int64_t>(sizeof(float))
               : 0;
  };
  step.state0 = field(1);
  step.state1 = field(2);
  step.state2 = field(3);
  return step;
}

}  // namespace internal
}  // namespace recsdk
