// The C interface of tables in a device's memory, on every backend.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "device_test_support.h"
#include "recsdk/c_api.h"

namespace recsdk::test::c_api_device_test {
namespace {

struct DestroyDeviceTable {
  void operator()(recsdk_device_table* table) const { recsdk_device_table_destroy(table); }
};
using DeviceTableHandle = std::unique_ptr<recsdk_device_table, DestroyDeviceTable>;

class CDeviceTables : public DeviceTest {
 protected:
  recsdk_device_options options_of(std::int64_t max_device_rows) const {
    recsdk_device_options options{};
    options.struct_size = sizeof(options);
    EXPECT_EQ(recsdk_device_options_init(&options), RECSDK_OK);
    EXPECT_STREQ(options.backend, "npu");
    options.backend = GetParam().backend;
    options.max_device_rows = max_device_rows;
    return options;
  }
  DeviceTableHandle make(std::int64_t dim, std::int64_t max_device_rows) const {
    recsdk_table_config config = default_config(dim);
    recsdk_optimizer_config optimizer = default_optimizer(RECSDK_OPTIMIZER_ADAM);
    recsdk_initializer_config initializer = default_initializer();
    initializer.kind = RECSDK_INITIALIZER_UNIFORM;
    initializer.high = 1.0F;
    config.optimizer = &optimizer;
    config.initializer = &initializer;
    const recsdk_device_options options = options_of(max_device_rows);
    recsdk_device_table* table = nullptr;
    EXPECT_EQ(recsdk_device_table_create(&config, &options, &table), RECSDK_OK)
        << recsdk_last_error_message();
    return DeviceTableHandle(table);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, CDeviceTables, ::testing::ValuesIn(device_cases()), name_of);

TEST_P(CDeviceTables, TrainByKey) {
  EXPECT_EQ(recsdk_require_backend(GetParam().backend), RECSDK_OK);
  const DeviceTableHandle table = make(2, 3);
  std::int64_t keys[4] = {13, 11, 12, 10};  // 10 has the lowest hash: no room for it
  float values[8];
  std::uint8_t outcomes[4];
  ASSERT_EQ(recsdk_device_table_find_or_insert(table.get(), keys, 4, nullptr, values, outcomes),
            RECSDK_OK)
      << recsdk_last_error_message();
  EXPECT_EQ(outcomes[2], RECSDK_OUTCOME_INSERTED);
  EXPECT_EQ(outcomes[3], RECSDK_OUTCOME_REFUSED);
  const float gradients[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  ASSERT_EQ(recsdk_device_table_set_learning_rate(table.get(), 0.5F), RECSDK_OK);
  ASSERT_EQ(recsdk_device_table_apply_gradients(table.get(), keys, 4, gradients, outcomes),
            RECSDK_OK);
  EXPECT_EQ(outcomes[3], RECSDK_OUTCOME_MISSING);
  float after[8];
  float state[16];
  std::int64_t width = 0;
  ASSERT_EQ(recsdk_device_table_state_width(table.get(), &width), RECSDK_OK);
  EXPECT_EQ(width, 4);
  ASSERT_EQ(recsdk_device_table_read_rows(table.get(), keys, 4, after, state, nullptr), RECSDK_OK);
  EXPECT_NEAR(after[0], values[0] - 0.5F, 1e-4F);
  EXPECT_EQ(after[6], 0.0F);
  EXPECT_NEAR(state[0], 0.1F, 1e-6F);
  ASSERT_EQ(recsdk_device_table_lookup(table.get(), keys, 4, values, nullptr), RECSDK_OK);
  EXPECT_EQ(values[1], after[1]);
  auto* const over = reinterpret_cast<float*>(keys);
  EXPECT_EQ(recsdk_device_table_lookup(table.get(), keys, 4, over + 7, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_read_rows(table.get(), keys, 4, after, after + 7, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_find_or_insert(table.get(), keys, 4, nullptr, over, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);

  ASSERT_EQ(recsdk_device_table_erase(table.get(), keys, 1, outcomes), RECSDK_OK);
  ASSERT_EQ(recsdk_device_table_upsert(table.get(), keys, 1, after, state, outcomes), RECSDK_OK);
  EXPECT_EQ(outcomes[0], RECSDK_OUTCOME_INSERTED);
  std::int64_t begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t exported[4];
  float weights[8];
  ASSERT_EQ(
      recsdk_device_table_export_rows(table.get(), &begin, 4, exported, weights, state, &num_rows),
      RECSDK_OK);
  EXPECT_EQ(num_rows, 3);
  EXPECT_EQ(recsdk_device_table_export_rows(table.get(), &begin, std::int64_t{1} << 61, exported,
                                            weights, state, &num_rows),
            RECSDK_ERROR_INVALID_ARGUMENT);
  std::int64_t size = 0;
  std::uint64_t count = 0;
  float rate = 0.0F;
  recsdk_device_stats stats{};
  stats.struct_size = sizeof(stats);
  EXPECT_EQ(recsdk_device_table_size(table.get(), &size), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_set_update_count(table.get(), 5), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_update_count(table.get(), &count), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_learning_rate(table.get(), &rate), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_stats(table.get(), &stats), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_check_invariants(table.get()), RECSDK_OK);
  EXPECT_EQ(size, 3);
  EXPECT_EQ(count, 5U);
  EXPECT_EQ(rate, 0.5F);
  EXPECT_EQ(stats.erased, 1U);
  EXPECT_GT(stats.device_bytes, 0);
  EXPECT_EQ(recsdk_device_table_clear(table.get()), RECSDK_OK);
}

TEST_P(CDeviceTables, TrainByRowNumberInDeviceMemory) {
  const std::shared_ptr<internal::Device> device = open();
  const internal::CurrentDevice current(*device);
  Copies copies(*device);
  const DeviceTableHandle table = make(4, 10);
  const std::int64_t keys[3] = {1, 2, 1};
  std::int64_t rows[3];
  std::uint8_t outcomes[3];
  recsdk_lease* lease = nullptr;
  ASSERT_EQ(recsdk_device_table_lease(table.get(), 1, 7, &lease), RECSDK_OK);
  const LeaseHandle held(lease);
  ASSERT_EQ(recsdk_device_table_map(table.get(), keys, 3, 1, lease, rows, outcomes), RECSDK_OK);
  const internal::DeviceBuffer gradients = copies.up(std::vector<float>(12, 1.0F));
  const internal::DeviceBuffer out(*device, 48);
  ASSERT_EQ(recsdk_device_table_update(table.get(), rows, outcomes, 3, gradients.as<float>()),
            RECSDK_OK);
  ASSERT_EQ(recsdk_device_table_gather(table.get(), rows, outcomes, 3, out.as<float>()), RECSDK_OK);
  ASSERT_EQ(recsdk_device_table_synchronize(table.get()), RECSDK_OK);
  const std::vector<float> got = copies.down(out.as<float>(), 12);
  EXPECT_EQ(std::vector<float>(got.begin(), got.begin() + 4),
            std::vector<float>(got.begin() + 8, got.end()));
  void* stream = nullptr;
  ASSERT_EQ(recsdk_device_table_stream(table.get(), &stream), RECSDK_OK);
  EXPECT_EQ(stream == nullptr, std::string(GetParam().backend) == "cpu");
}

TEST_P(CDeviceTables, MistakesAreStatuses) {
  const DeviceTableHandle table = make(4, 10);
  const std::int64_t key = 1;
  float values[4];
  std::uint8_t outcome = 0;
  std::int64_t row = 0;
  recsdk_device_table* made = nullptr;
  const recsdk_table_config config = default_config(4);
  recsdk_device_options options = options_of(0);
  EXPECT_EQ(recsdk_device_table_create(&config, &options, &made), RECSDK_ERROR_INVALID_ARGUMENT);
  options = options_of(1);
  options.reserved = 1;
  EXPECT_EQ(recsdk_device_table_create(&config, &options, &made), RECSDK_ERROR_INVALID_ARGUMENT);
  options = options_of(1);
  options.struct_size = 1;
  EXPECT_EQ(recsdk_device_table_create(&config, &options, &made), RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(recsdk_device_table_lookup(nullptr, &key, 1, values, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_lookup(table.get(), &key, 1, nullptr, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_lookup(table.get(), &key, -1, values, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_apply_gradients(table.get(), &key, 1, nullptr, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_map(table.get(), &key, 1, 1, nullptr, &row, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  ASSERT_EQ(recsdk_device_table_map(table.get(), &key, 1, 1, nullptr, &row, &outcome), RECSDK_OK);
  EXPECT_EQ(recsdk_device_table_gather(table.get(), &row, &outcome, 1, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_device_table_stream(table.get(), nullptr), RECSDK_ERROR_INVALID_ARGUMENT);
  recsdk_device_table_destroy(nullptr);
}

/// On the stand-in, which alone fails on demand.
class CFailingDevices : public CDeviceTables {};

std::vector<DeviceCase> failing_cases() {
  std::vector<DeviceCase> cases = device_cases();
  std::erase_if(cases, [](const DeviceCase& each) { return !each.is_fake; });
  return cases;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CFailingDevices);  // on the hardware
INSTANTIATE_TEST_SUITE_P(Backends, CFailingDevices, ::testing::ValuesIn(failing_cases()), name_of);

TEST_P(CFailingDevices, AFailingDeviceIsAStatus) {
  const DeviceTableHandle table = make(4, 10);
  fake_acl().fail(1, 507899, false);
  EXPECT_EQ(recsdk_device_table_synchronize(table.get()), RECSDK_ERROR_DEVICE);
  const std::string message = recsdk_last_error_message();
  EXPECT_NE(message.find("507899"), std::string::npos) << message;
}

}  // namespace
}  // namespace recsdk::test::c_api_device_test
