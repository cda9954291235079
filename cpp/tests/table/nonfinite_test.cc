// What a table does about gradients that are not finite, crossed with every way to store, round and
// update rows, of more keys than are fetched ahead.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "optimizer_configs.h"
#include "recsdk/recsdk.h"

namespace recsdk::test::nonfinite_test {
namespace {

constexpr std::int64_t kDim = 5;
constexpr std::size_t kNumKeys = 100;

struct Rows {
  DType dtype = DType::kFloat32;
  Rounding rounding = Rounding::kNearest;
};

constexpr Rows kRows[] = {
    {},
    {DType::kBFloat16, Rounding::kNearest},
    {DType::kBFloat16, Rounding::kStochastic},
    {DType::kFloat16, Rounding::kNearest},
    {DType::kFloat16, Rounding::kStochastic},
};

Table table_of(const Rows& rows, const OptimizerConfig& optimizer, NonFinite on_nonfinite) {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = optimizer;
  config.weight_dtype = rows.dtype;
  config.rounding = rows.rounding;
  config.on_nonfinite = on_nonfinite;
  return Table(config);
}

std::vector<Key> some_keys() {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < kNumKeys; ++i)
    keys.push_back(static_cast<Key>(i % 70) * 0x123456789ABCDEFL - 9);
  return keys;
}

std::vector<float> weights(const Table& table) {
  std::vector<float> values(kNumKeys * kDim);
  table.lookup(some_keys(), values.data());
  return values;
}

class NonFiniteGradients : public ::testing::TestWithParam<std::string> {
 protected:
  IsaScope scope_{GetParam()};
};

TEST_P(NonFiniteGradients, EachAnswerFitsEachKindOfRowAndOptimizer) {
  const std::vector<Key> keys = some_keys();
  std::vector<float> values(kNumKeys * kDim);
  const std::vector<float> good = random_floats(kNumKeys * kDim, 3);
  std::vector<float> bad = good;
  bad[40 * kDim + 2] = std::numeric_limits<float>::infinity();
  for (const NamedConfig& named : all_configs()) {
    for (const Rows& rows : kRows) {
      SCOPED_TRACE(named.name + ", dtype " + std::to_string(static_cast<int>(rows.dtype)) +
                   ", rounding " + std::to_string(static_cast<int>(rows.rounding)));
      Table applying = table_of(rows, named.config, NonFinite::kApply);
      Table raising = table_of(rows, named.config, NonFinite::kRaise);
      Table skipping = table_of(rows, named.config, NonFinite::kSkip);
      for (Table* table : {&applying, &raising, &skipping}) {
        table->find_or_insert(keys, values.data());
        table->apply_gradients(keys, good.data());
      }
      const std::vector<float> before = weights(applying);
      EXPECT_TRUE(bits_equal(weights(raising), before));
      EXPECT_TRUE(bits_equal(weights(skipping), before));
      EXPECT_THROW(raising.apply_gradients(keys, bad.data()), Error);
      EXPECT_TRUE(bits_equal(weights(raising), before));
      EXPECT_EQ(raising.update_count(), 1U);
      applying.apply_gradients(keys, bad.data());
      skipping.apply_gradients(keys, bad.data());
      EXPECT_EQ(applying.stats().nonfinite, 1U);
      EXPECT_EQ(skipping.stats().nonfinite, 1U);
      std::vector<float> applied = weights(applying);
      std::copy_n(before.begin() + 40 * kDim, kDim, applied.begin() + 40 * kDim);
      EXPECT_TRUE(bits_equal(weights(skipping), applied));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, NonFiniteGradients, ::testing::ValuesIn(available_isas()));

}  // namespace
}  // namespace recsdk::test::nonfinite_test
