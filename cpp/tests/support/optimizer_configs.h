// The optimizers that the tests try.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "recsdk/optimizer.h"

namespace recsdk::test {

struct NamedConfig {
  std::string name;
  OptimizerConfig config;
};

inline OptimizerConfig with(OptimizerConfig config,
                            const std::function<void(OptimizerConfig&)>& change) {
  change(config);
  return config;
}

inline void by_row(OptimizerConfig& config) { config.bias_correction = BiasCorrection::kRow; }

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
      {"adam_by_row", with(OptimizerConfig::adam(0.01F), by_row)},
      {"adamw", OptimizerConfig::adamw(0.01F, 0.2F)},
      {"adamw_all", with(OptimizerConfig::adamw(0.01F, 0.2F),
                         [](auto& c) {
                           by_row(c);
                           c.catch_up = true;
                         })},
      {"momentum", with(OptimizerConfig::sgd(0.05F), [](auto& c) { c.momentum = 0.9F; })},
      {"momentum_nesterov", with(OptimizerConfig::sgd(0.05F),
                                 [](auto& c) {
                                   c.momentum = 0.9F;
                                   c.nesterov = true;
                                 })},
      {"momentum_all", with(OptimizerConfig::sgd(0.05F),
                            [](auto& c) {
                              c.momentum = 0.8F;
                              c.dampening = 0.3;
                              c.weight_decay = 0.1F;
                              c.weight_decay_mode = WeightDecay::kDecoupled;
                              c.catch_up = true;
                            })},
      {"partial_rowwise_adam", OptimizerConfig::partial_rowwise_adam(0.01F)},
      {"partial_rowwise_adam_all", with(OptimizerConfig::partial_rowwise_adam(0.01F),
                                        [](auto& c) {
                                          by_row(c);
                                          c.weight_decay = 0.2F;
                                        })},
      {"lamb", OptimizerConfig::lamb(0.01F)},
      {"lamb_all", with(OptimizerConfig::lamb(0.01F),
                        [](auto& c) {
                          by_row(c);
                          c.weight_decay = 0.2F;
                        })},
      {"ftrl", OptimizerConfig::ftrl(0.05F)},
      {"ftrl_all", with(OptimizerConfig::ftrl(0.05F),
                        [](auto& c) {
                          c.l1 = 0.2F;
                          c.l2 = 0.3F;
                          c.beta = 0.4F;
                        })},
      {"rmsprop", OptimizerConfig::rmsprop(0.05F)},
      {"rmsprop_all", with(OptimizerConfig::rmsprop(0.05F, 0.9),
                           [](auto& c) {
                             c.momentum = 0.7F;
                             c.centered = true;
                             c.weight_decay = 0.1F;
                           })},
      {"sgd_catch_up", with(OptimizerConfig::sgd(0.05F),
                            [](auto& c) {
                              c.weight_decay = 0.1F;
                              c.catch_up = true;
                            })},
      {"sgd_clip_value", with(OptimizerConfig::sgd(0.05F), [](auto& c) { c.clip_value = 0.5F; })},
      {"adam_clip", with(OptimizerConfig::adam(0.01F),
                         [](auto& c) {
                           c.clip_value = 0.75F;
                           c.clip_norm = 1.0F;
                         })},
  };
  return configs;
}

}  // namespace recsdk::test
