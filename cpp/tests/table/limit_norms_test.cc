// limit_norms and norm_factors against norms computed here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernel_support.h"
#include "recsdk/recsdk.h"

namespace recsdk::limit_norms_test {
namespace {

using test::random_floats;

constexpr std::int64_t kDim = 5;
constexpr std::int64_t kNumKeys = 40;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Example {
  explicit Example(DType dtype = DType::kFloat32) : table(config_of(dtype)) {
    for (Key key = 0; key < kNumKeys; ++key) keys.push_back(key);
    values = random_floats(kNumKeys * kDim, 3, -1.0F, 1.0F);
    table.upsert(keys, values.data());
    lease = table.lease();
    for (const Key key : {7, 3, 7, 99, 12, 3, 30}) looked_up.push_back(key);
    rows.resize(looked_up.size());
    outcomes.resize(looked_up.size());
    table.map(looked_up, rows, outcomes, {false, &lease});
  }

  static TableConfig config_of(DType dtype) {
    TableConfig config;
    config.dim = kDim;
    config.weight_dtype = dtype;
    config.optimizer = OptimizerConfig::adagrad(0.1F);
    return config;
  }

  std::vector<float> all_rows() {
    std::vector<float> found(values.size());
    table.lookup(keys, found.data());
    return found;
  }

  Table table;
  std::vector<Key> keys;
  std::vector<float> values;
  Lease lease;
  std::vector<Key> looked_up;
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

double norm_of(const float* row, double p) {
  double sum = 0.0;
  double most = 0.0;
  for (std::int64_t d = 0; d < kDim; ++d) {
    sum += std::pow(std::abs(row[d]), p);
    most = std::max(most, std::abs(static_cast<double>(row[d])));
  }
  return std::isinf(p) ? most : std::pow(sum, 1.0 / p);
}

class LimitNorms : public ::testing::TestWithParam<double> {};

TEST_P(LimitNorms, ScalesRowsBeyondTheLimitOnceAndNoOthers) {
  const double p = GetParam();
  Example of;
  const NormLimit limit{p == 1.0 ? 2.0 : 0.8, p};
  std::vector<float> factors(of.rows.size());
  of.table.norm_factors(of.rows, of.outcomes, limit, factors.data());
  const std::vector<float> before = of.all_rows();
  ASSERT_EQ(before, of.values);
  std::int64_t num_beyond = 0;
  std::vector<float> expected = before;
  for (const Key key : {3, 7, 12, 30}) {
    float* const row = expected.data() + key * kDim;
    const double norm = norm_of(row, p);
    if (norm <= limit.max_norm) continue;
    ++num_beyond;
    for (std::int64_t d = 0; d < kDim; ++d)
      row[d] *= static_cast<float>(limit.max_norm / (norm + 1e-7));
  }
  ASSERT_GT(num_beyond, 0);
  EXPECT_EQ(of.table.limit_norms(of.rows, of.outcomes, limit), num_beyond);
  const std::vector<float> after = of.all_rows();
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_NEAR(after[i], expected[i], 1e-6F) << i;
  for (std::size_t i = 0; i < of.looked_up.size(); ++i) {
    const bool is_there = of.looked_up[i] < kNumKeys;
    const auto at = static_cast<std::size_t>(is_there ? of.looked_up[i] * kDim : 0);
    if (is_there) {
      EXPECT_EQ(before[at] * factors[i], after[at]) << i;
    } else {
      EXPECT_EQ(factors[i], 1.0F);
    }
  }
  EXPECT_EQ(of.table.limit_norms(of.rows, of.outcomes, limit), 0) << "rows are within the limit";
  EXPECT_EQ(of.table.update_count(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Types, LimitNorms, ::testing::Values(1.0, 2.0, 3.0, kInfinity));

TEST(LimitNormsOfHalves, WritesWhatFitsIntoSixteenBits) {
  Example of(DType::kBFloat16);
  EXPECT_GT(of.table.limit_norms(of.rows, of.outcomes, {0.5, 2.0}), 0);
  const std::vector<float> after = of.all_rows();
  for (const Key key : {3, 7, 12, 30}) EXPECT_LT(norm_of(after.data() + key * kDim, 2.0), 0.51);
}

TEST(LimitNormsBesideACut, CopiesTheRowsForItAndCountsThemAsChanged) {
  Example of;
  of.table.cut({}).finish(true);
  Cut cut = of.table.cut({});
  const std::int64_t num_beyond = of.table.limit_norms(of.rows, of.outcomes, {0.1, 2.0});
  EXPECT_GT(num_beyond, 0);
  EXPECT_GT(cut.copied_bytes(), 0);
  cut.finish(true);
  EXPECT_EQ(of.table.cut({true, std::nullopt}).num_rows(), num_beyond);
}

TEST(LimitNormsChecks, RefuseLimitsAndRowsOutOfRange) {
  Example of;
  const NormLimit good{1.0, 2.0};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const NormLimit bad : {NormLimit{-1.0, 2.0}, NormLimit{1.0, 0.0}, NormLimit{nan, 2.0}}) {
    EXPECT_THROW(of.table.limit_norms(of.rows, of.outcomes, bad), std::invalid_argument);
  }
  of.rows[0] = 1 << 20;
  EXPECT_THROW(of.table.limit_norms(of.rows, of.outcomes, good), std::invalid_argument);
  EXPECT_EQ(of.all_rows(), of.values);
}

}  // namespace
}  // namespace recsdk::limit_norms_test
