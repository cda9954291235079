// Every kind of table against the table of optimizer updates: the engine's to the bit, a device's
// within the order in which it rounds.
#include "optimizer_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_test_support.h"
#include "kernel_support.h"
#include "recsdk/recsdk.h"

namespace recsdk::test::optimizer_updates_test {
namespace {

using test::optimizer_cases;
using test::OptimizerCase;
using test::OptimizerUpdate;

// Roundings of the largest number that a field has before or after: a device divides, takes roots
// and scales in an order of its own.
constexpr float kRoundings = 4.0F;

struct Row {
  std::vector<float> weights;
  std::vector<float> state;
};

TableConfig config_of(const OptimizerCase& of, const OptimizerUpdate& update) {
  TableConfig config;
  config.dim = static_cast<std::int64_t>(update.weights.size());
  config.optimizer = of.config;
  return config;
}

template <typename AnyTable>
Row updated(AnyTable& table, const OptimizerUpdate& update) {
  std::vector<std::string> names;
  for (const RowField& field : table.layout().fields) names.push_back(field.name);
  names.erase(names.begin());
  EXPECT_EQ(names, update.state_fields);
  const Key key = -7;
  table.upsert({&key, 1}, update.weights.data(), update.state.data());
  table.set_update_count(update.t - 1);
  table.set_learning_rate(update.learning_rate);
  table.apply_gradients({&key, 1}, update.gradient.data());
  Row row{std::vector<float>(update.weights.size()), std::vector<float>(update.state.size())};
  RowNumber begin = 0;
  Key found = 0;
  EXPECT_EQ(table.export_rows(begin, {1, &found, row.weights.data(), row.state.data()}), 1);
  return row;
}

class EnginesTable : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Isas, EnginesTable, ::testing::ValuesIn(available_isas()),
                         [](const auto& named) { return named.param; });

TEST_P(EnginesTable, UpdatesRowsToTheBit) {
  const test::IsaScope scope(GetParam());
  for (const OptimizerCase& one : optimizer_cases()) {
    for (const OptimizerUpdate& update : one.updates) {
      SCOPED_TRACE(one.name + ", update " + std::to_string(update.t));
      ASSERT_EQ(one.tables.count("Table"), 1U);
      Table table(config_of(one, update));
      table.set_log_decay(update.log_decay);
      const Row row = updated(table, update);
      EXPECT_TRUE(test::bits_equal(row.weights, update.weights_after));
      EXPECT_TRUE(test::bits_equal(row.state, update.state_after));
    }
  }
}

class DeviceTables : public DeviceTest {};

INSTANTIATE_TEST_SUITE_P(Backends, DeviceTables, ::testing::ValuesIn(device_cases()), name_of);

void expect_rounded(const std::vector<float>& got, const std::vector<float>& before,
                    const std::vector<float>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float largest = std::max(std::fabs(before[i]), std::fabs(wanted[i]));
    const float rounding = largest * std::numeric_limits<float>::epsilon();
    EXPECT_NEAR(got[i], wanted[i], kRoundings * rounding) << "at " << i;
  }
}

TEST_P(DeviceTables, UpdateRowsUpToRounding) {
  for (const OptimizerCase& one : optimizer_cases()) {
    if (one.tables.count("DeviceTable") == 0) continue;
    for (const OptimizerUpdate& update : one.updates) {
      SCOPED_TRACE(one.name + ", update " + std::to_string(update.t));
      DeviceTable table(config_of(one, update), options(1));
      const Row row = updated(table, update);
      expect_rounded(row.weights, update.weights, update.weights_after);
      expect_rounded(row.state, update.state, update.state_after);
    }
  }
}

TEST_P(DeviceTables, RefuseTheOtherOptimizers) {
  for (const OptimizerCase& one : optimizer_cases()) {
    if (one.tables.count("DeviceTable") != 0) continue;
    SCOPED_TRACE(one.name);
    EXPECT_THROW(DeviceTable(config_of(one, one.updates[0]), options(1)), std::invalid_argument);
  }
}

}  // namespace
}  // namespace recsdk::test::optimizer_updates_test
