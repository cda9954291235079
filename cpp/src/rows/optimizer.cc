#include "recsdk/optimizer.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "util/must.h"

namespace recsdk {
namespace {

// `why` is empty where the wanted values say it.
[[noreturn]] void refuse(const char* name, const char* wanted, const auto& value,
                         const std::string& why = "") {
  throw std::invalid_argument("optimizer: " + internal::must(name, wanted, value) + why);
}

void require_not_negative(const char* name, float value) {
  // Written so that a NaN is refused as well.
  if (!(value >= 0.0F) || !std::isfinite(value)) refuse(name, "be finite and 0 or more", value);
}

void require_below_one(const char* name, double value) {
  if (!(value >= 0.0) || !(value < 1.0)) refuse(name, "be at least 0 and below 1", value);
}

void require_positive(const char* name, double value) {
  if (!(value > 0.0) || !std::isfinite(value)) refuse(name, "be finite and above 0", value);
}

bool is_one_of(OptimizerKind kind, std::initializer_list<OptimizerKind> kinds) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

constexpr auto kAdamAndKin = {OptimizerKind::kAdam, OptimizerKind::kPartialRowwiseAdam,
                              OptimizerKind::kLamb};

void check_ranges(const OptimizerConfig& c) {
  require_not_negative("learning_rate", c.learning_rate);
  require_not_negative("eps", c.eps);
  require_not_negative("weight_decay", c.weight_decay);
  require_not_negative("lr_decay", c.lr_decay);
  require_not_negative("initial_accumulator_value", c.initial_accumulator_value);
  require_not_negative("momentum", c.momentum);
  require_not_negative("l1", c.l1);
  require_not_negative("l2", c.l2);
  require_not_negative("beta", c.beta);
  require_below_one("beta1", c.beta1);
  require_below_one("beta2", c.beta2);
  require_below_one("alpha", c.alpha);
  require_below_one("dampening", c.dampening);
  if (c.clip_value) require_positive("clip_value", static_cast<double>(*c.clip_value));
  if (c.clip_norm) require_positive("clip_norm", static_cast<double>(*c.clip_norm));
}

void check_use(const OptimizerConfig& c) {
  using Kind = OptimizerKind;
  const auto only = [&](const char* name, double value, const char* users,
                        std::initializer_list<Kind> kinds) {
    if (value == 0.0 || is_one_of(c.kind, kinds)) return;
    const std::string verb = kinds.size() == 1 ? " has it" : " have it";
    refuse(name, "be 0", value, ": only " + (users + verb));
  };
  only("lr_decay", static_cast<double>(c.lr_decay), "Adagrad", {Kind::kAdagrad});
  only("initial_accumulator_value", static_cast<double>(c.initial_accumulator_value),
       "Adagrad, rowwise Adagrad and FTRL", {Kind::kAdagrad, Kind::kRowwiseAdagrad, Kind::kFtrl});
  only("bias_correction", static_cast<double>(c.bias_correction),
       "Adam, partial rowwise Adam and LAMB", kAdamAndKin);
  only("momentum", static_cast<double>(c.momentum), "SGD and RMSprop",
       {Kind::kSgd, Kind::kRmsprop});
  only("dampening", c.dampening, "SGD", {Kind::kSgd});
  only("nesterov", static_cast<double>(c.nesterov), "SGD", {Kind::kSgd});
  only("centered", static_cast<double>(c.centered), "RMSprop", {Kind::kRmsprop});
  only("l1", static_cast<double>(c.l1), "FTRL", {Kind::kFtrl});
  only("l2", static_cast<double>(c.l2), "FTRL", {Kind::kFtrl});
  only("beta", static_cast<double>(c.beta), "FTRL", {Kind::kFtrl});
  if (c.dampening != 0.0 && c.momentum == 0.0F)
    refuse("dampening", "be 0", c.dampening, ": it needs momentum");
  if (c.nesterov && (c.momentum == 0.0F || c.dampening != 0.0))
    refuse("nesterov", "be false", true, ": it needs momentum without dampening");
}

void check_decay(const OptimizerConfig& c) {
  const auto decay = static_cast<double>(c.weight_decay);
  if (c.kind == OptimizerKind::kFtrl && decay != 0.0)
    refuse("weight_decay", "be 0", decay, ": FTRL has l1 and l2 instead");
  const bool is_decoupled = c.weight_decay_mode == WeightDecay::kDecoupled;
  if (is_decoupled && is_one_of(c.kind, {OptimizerKind::kFtrl, OptimizerKind::kLamb})) {
    refuse("weight_decay_mode", "be WeightDecay::kL2", c.weight_decay_mode,
           ": FTRL has no weight decay and LAMB one of its own");
  }
  if (!c.catch_up) return;
  const bool is_product = is_decoupled || (c.kind == OptimizerKind::kSgd && c.momentum == 0.0F);
  if (!is_product) {
    refuse("catch_up", "be false", true,
           ": it needs decoupled weight decay or SGD without momentum, since an update without a "
           "gradient is no product otherwise");
  }
  if (static_cast<double>(c.learning_rate) * decay >= 1.0) {
    refuse("learning_rate * weight_decay", "be below 1 with catch_up",
           static_cast<double>(c.learning_rate) * decay);
  }
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

OptimizerConfig OptimizerConfig::adamw(float learning_rate, float weight_decay) {
  OptimizerConfig config = adam(learning_rate);
  config.weight_decay = weight_decay;
  config.weight_decay_mode = WeightDecay::kDecoupled;
  return config;
}

OptimizerConfig OptimizerConfig::partial_rowwise_adam(float learning_rate, double beta1,
                                                      double beta2, float eps) {
  OptimizerConfig config = adam(learning_rate, beta1, beta2, eps);
  config.kind = OptimizerKind::kPartialRowwiseAdam;
  config.weight_decay_mode = WeightDecay::kDecoupled;
  return config;
}

OptimizerConfig OptimizerConfig::lamb(float learning_rate, double beta1, double beta2, float eps) {
  OptimizerConfig config = adam(learning_rate, beta1, beta2, eps);
  config.kind = OptimizerKind::kLamb;
  return config;
}

OptimizerConfig OptimizerConfig::ftrl(float learning_rate) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kFtrl;
  config.learning_rate = learning_rate;
  config.initial_accumulator_value = 0.1F;
  return config;
}

OptimizerConfig OptimizerConfig::rmsprop(float learning_rate, double alpha, float eps) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kRmsprop;
  config.learning_rate = learning_rate;
  config.alpha = alpha;
  config.eps = eps;
  return config;
}

void OptimizerConfig::validate() const {
  if (kind > OptimizerKind::kRmsprop) refuse("kind", "be one of OptimizerKind", kind);
  if (bias_correction > BiasCorrection::kRow) {
    refuse("bias_correction", "be one of BiasCorrection", bias_correction);
  }
  if (weight_decay_mode > WeightDecay::kDecoupled) {
    refuse("weight_decay_mode", "be one of WeightDecay", weight_decay_mode);
  }
  check_ranges(*this);
  check_use(*this);
  check_decay(*this);
}

}  // namespace recsdk
