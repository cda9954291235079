// One device table, many threads.
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "device_test_support.h"
#include "recsdk/device_table.h"

namespace recsdk::test::device_threads_test {
namespace {

class DeviceThreads : public DeviceTest {};

INSTANTIATE_TEST_SUITE_P(Backends, DeviceThreads, ::testing::ValuesIn(device_cases()), name_of);

TEST_P(DeviceThreads, InsertTrainReadAndErase) {
  TableConfig config;
  config.dim = 8;
  config.optimizer = OptimizerConfig::adagrad();
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  DeviceTable table(config, options(300));
  const auto work = [&table](std::uint64_t seed) {
    Noise noise(seed);
    for (int i = 0; i < 12; ++i) {
      const std::vector<Key> keys = noise.keys(20, 400);
      std::vector<float> values(keys.size() * 8);
      table.find_or_insert(keys, values.data());
      table.apply_gradients(keys, values.data());
      table.lookup(keys, values.data());
      table.erase(noise.keys(10, 400));
      static_cast<void>(table.stats());
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  table.check_invariants();
  EXPECT_EQ(table.update_count(), 36U);
}

// A background thread maps the next batches while this one trains.
TEST_P(DeviceThreads, MapAheadOfTraining) {
  TableConfig config;
  config.dim = 4;
  config.optimizer = OptimizerConfig::sgd(0.5F);
  DeviceTable ahead(config, options(1000));
  DeviceTable in_turn(config, options(1000));
  constexpr std::size_t kBatches = 10;
  std::vector<std::vector<Key>> batches;
  std::vector<std::vector<float>> gradients;
  Noise noise(1);
  for (std::size_t b = 0; b < kBatches; ++b) {
    batches.push_back(noise.keys(50, 200));
    gradients.push_back(noise.values(200));
  }
  const auto map = [](DeviceTable& table, const std::vector<Key>& keys) {
    std::vector<RowNumber> rows(keys.size());
    std::vector<Outcome> outcomes(keys.size());
    table.map(keys, rows, outcomes, {true});
  };
  for (const std::vector<Key>& keys : batches) map(ahead, keys);
  std::thread mapping([&] {
    for (const std::vector<Key>& keys : batches) map(ahead, keys);
  });
  for (std::size_t b = 0; b < kBatches; ++b) ahead.apply_gradients(batches[b], gradients[b].data());
  mapping.join();
  for (const std::vector<Key>& keys : batches) map(in_turn, keys);
  for (std::size_t b = 0; b < kBatches; ++b)
    in_turn.apply_gradients(batches[b], gradients[b].data());
  std::vector<float> got(200);
  std::vector<float> wanted(200);
  ahead.lookup(batches[3], got.data());
  in_turn.lookup(batches[3], wanted.data());
  EXPECT_EQ(got, wanted);
}

}  // namespace
}  // namespace recsdk::test::device_threads_test
