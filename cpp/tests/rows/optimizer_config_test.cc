// Configurations of optimizers and the numbers of one step.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "bad_configs.h"
#include "kernels/optimizer_step.h"
#include "optimizer_configs.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"

namespace recsdk::optimizer_config_test {
namespace {

using test::all_configs;
using test::NamedConfig;
using test::with;

TEST(OptimizerStep, FollowsTheTablesCount) {
  OptimizerConfig adagrad = OptimizerConfig::adagrad(0.5F);
  adagrad.lr_decay = 0.25F;
  const auto step_of = [](const OptimizerConfig& config, std::uint64_t t) {
    return internal::make_optimizer_step(config, RowLayout::make(8, config), NonFinite::kSkip, t,
                                         0.0);
  };
  EXPECT_EQ(step_of(adagrad, 1).learning_rate, 0.5F);
  EXPECT_EQ(step_of(adagrad, 5).learning_rate, 0.25F);
  EXPECT_EQ(step_of(adagrad, 5).on_nonfinite, NonFinite::kSkip);
  const OptimizerConfig adam = OptimizerConfig::adam(0.001F);
  for (const std::uint64_t t : {1U, 2U, 7U, 1000U, 4000000U}) {
    const auto exponent = static_cast<double>(t);
    EXPECT_FLOAT_EQ(step_of(adam, t).learning_rate,
                    static_cast<float>(0.001 / (1.0 - std::pow(0.9, exponent))));
    EXPECT_FLOAT_EQ(step_of(adam, t).inv_sqrt_bias2,
                    static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.999, exponent))));
  }
  EXPECT_EQ(step_of(adam, 1).one_minus_beta2, 0.001F);
  EXPECT_EQ(step_of(adam, 1).columns[0], 8);
  EXPECT_EQ(step_of(adam, 1).columns[1], 16);
  EXPECT_FALSE(step_of(adam, 1).needs_preparation);
}

TEST(OptimizerConfig, SaysWhatIsWrong) {
  const auto sgd = [](const auto& change) { return with(OptimizerConfig::sgd(), change); };
  const std::vector<test::BadConfig<OptimizerConfig>> bad = {
      {OptimizerConfig::sgd(-1.0F),
       "optimizer: learning_rate must be finite and 0 or more, got -1"},
      {OptimizerConfig::sgd(NAN), "optimizer: learning_rate must be finite and 0 or more, got nan"},
      {OptimizerConfig::adagrad(0.1F, INFINITY),
       "optimizer: eps must be finite and 0 or more, got inf"},
      {sgd([](auto& c) { c.weight_decay = -0.5F; }),
       "optimizer: weight_decay must be finite and 0 or more, got -0.5"},
      {sgd([](auto& c) { c.lr_decay = 0.5F; }),
       "optimizer: lr_decay must be 0, got 0.5: only Adagrad has it"},
      {sgd([](auto& c) { c.initial_accumulator_value = 0.5F; }),
       "optimizer: initial_accumulator_value must be 0, got 0.5: only Adagrad, rowwise Adagrad and "
       "FTRL have it"},
      {sgd([](auto& c) { c.bias_correction = BiasCorrection::kRow; }),
       "optimizer: bias_correction must be 0, got 1: only Adam, partial rowwise Adam and LAMB have "
       "it"},
      {sgd([](auto& c) { c.kind = static_cast<OptimizerKind>(9); }),
       "optimizer: kind must be one of OptimizerKind, got 9"},
      {OptimizerConfig::adam(0.1F, 1.0), "optimizer: beta1 must be at least 0 and below 1, got 1"},
      {OptimizerConfig::adam(0.1F, 0.9, -0.1),
       "optimizer: beta2 must be at least 0 and below 1, got -0.1"},
      {OptimizerConfig::adam(0.1F, 0.9, std::numeric_limits<double>::quiet_NaN()),
       "optimizer: beta2 must be at least 0 and below 1, got nan"},
      {sgd([](auto& c) { c.dampening = 0.5; }),
       "optimizer: dampening must be 0, got 0.5: it needs momentum"},
      {sgd([](auto& c) { c.nesterov = true; }),
       "optimizer: nesterov must be false, got true: it needs momentum without dampening"},
      {sgd([](auto& c) { c.centered = true; }),
       "optimizer: centered must be 0, got 1: only RMSprop has it"},
      {sgd([](auto& c) { c.clip_norm = 0.0F; }),
       "optimizer: clip_norm must be finite and above 0, got 0"},
      {sgd([](auto& c) { c.clip_value = INFINITY; }),
       "optimizer: clip_value must be finite and above 0, got inf"},
      {sgd([](auto& c) { c.weight_decay_mode = static_cast<WeightDecay>(2); }),
       "optimizer: weight_decay_mode must be one of WeightDecay, got 2"},
      {with(OptimizerConfig::lamb(),
            [](auto& c) { c.weight_decay_mode = WeightDecay::kDecoupled; }),
       "optimizer: weight_decay_mode must be WeightDecay::kL2, got 1: FTRL has no weight decay and "
       "LAMB one of its own"},
      {with(OptimizerConfig::ftrl(), [](auto& c) { c.weight_decay = 0.5F; }),
       "optimizer: weight_decay must be 0, got 0.5: FTRL has l1 and l2 instead"},
      {with(OptimizerConfig::adagrad(), [](auto& c) { c.catch_up = true; }),
       "optimizer: catch_up must be false, got true: it needs decoupled weight decay or SGD "
       "without momentum, since an update without a gradient is no product otherwise"},
      {with(OptimizerConfig::adamw(2.0F, 0.5F), [](auto& c) { c.catch_up = true; }),
       "optimizer: learning_rate * weight_decay must be below 1 with catch_up, got 1"},
  };
  test::expect_refused(bad);
}

TEST(OptimizerConfig, AcceptsWhatItMakes) {
  for (const NamedConfig& named : all_configs())
    EXPECT_NO_THROW(named.config.validate()) << named.name;
  EXPECT_NO_THROW(OptimizerConfig().validate());
  EXPECT_NO_THROW(OptimizerConfig::sgd(0.0F).validate());
}

}  // namespace
}  // namespace recsdk::optimizer_config_test
