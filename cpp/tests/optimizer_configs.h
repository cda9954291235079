// The optimizers that the tests try.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "recsdk/optimizer.h"

namespace recsdk::testing {

struct NamedConfig {
  std::string name;
  OptimizerConfig config;
};

inline OptimizerConfig with(OptimizerConfig config,
                            const std::function<void(OptimizerConfig&)>& change) {
  change(config);
  return config;
}

/// Every optimizer, plain and with each of its numbers set.
inline const std::vector<NamedConfig>& all_configs() {
  static const std::vector<NamedConfig> configs = {
      {"sgd", OptimizerConfig::sgd(0.05F)},
      {"sgd_decay", with(OptimizerConfig::sgd(0.05F), [](auto& c) { c.weight_decay = 0.1F; })},
      {"adagrad", OptimizerConfig::adagrad(0.05F)},
      {"adagrad_all", with(OptimizerConfig::adagrad(0.05F, 1e-6F),
                           [](auto& c) {
                             c.lr_decay = 0.1F;
                             c.weight_decay = 0.2F;
                             c.initial_accumulator_value = 0.3F;
                           })},
      {"rowwise", OptimizerConfig::rowwise_adagrad(0.05F)},
      {"rowwise_decay", with(OptimizerConfig::rowwise_adagrad(0.05F, 1e-6F),
                             [](auto& c) { c.weight_decay = 0.2F; })},
      {"adam", OptimizerConfig::adam(0.01F)},
      {"adam_decay",
       with(OptimizerConfig::adam(0.01F, 0.4, 0.99), [](auto& c) { c.weight_decay = 0.2F; })},
      {"adam_by_row", with(OptimizerConfig::adam(0.01F),
                           [](auto& c) { c.bias_correction = BiasCorrection::kRow; })},
  };
  return configs;
}

}  // namespace recsdk::testing
