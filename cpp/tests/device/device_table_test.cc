// Tables in a device's memory, on every backend; their peer is the engine's table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "device_test_support.h"
#include "recsdk/device_table.h"
#include "recsdk/table.h"

namespace recsdk::test::device_table_test {
namespace {

using internal::CurrentDevice;
using internal::Device;
using internal::DeviceBuffer;
using Outcomes = std::vector<Outcome>;

constexpr Outcome kFound = Outcome::kFound;
constexpr Outcome kInserted = Outcome::kInserted;
constexpr Outcome kMissing = Outcome::kMissing;
constexpr Outcome kRefused = Outcome::kRefused;

class DeviceTables : public DeviceTest {};

INSTANTIATE_TEST_SUITE_P(Backends, DeviceTables, ::testing::ValuesIn(device_cases()), name_of);

TableConfig config_of(std::int64_t dim,
                      const OptimizerConfig& optimizer = OptimizerConfig::sgd(0.1F)) {
  TableConfig config;
  config.dim = dim;
  config.name = "items";
  config.seed = 3;
  config.optimizer = optimizer;
  config.initializer = InitializerConfig::normal(0.0F, 1.0F);
  return config;
}

template <typename AnyTable>
struct Mapped {
  Mapped(AnyTable& table, const std::vector<Key>& keys, bool insert, const Lease* lease = nullptr)
      : rows(keys.size()), outcomes(keys.size()) {
    table.map(keys, rows, outcomes, {insert, lease});
  }
  std::vector<RowNumber> rows;
  Outcomes outcomes;
};

template <typename AnyTable>
void insert(AnyTable& table, const std::vector<Key>& keys, const Lease* lease = nullptr) {
  const Mapped<AnyTable> mapped(table, keys, true, lease);
}

struct Rows {
  std::vector<Key> keys;
  std::vector<float> weights;
  std::vector<float> state;
};

template <typename AnyTable>
Rows exported(const AnyTable& table, std::int64_t capacity = 7) {
  Rows all;
  const auto dim = static_cast<std::size_t>(table.config().dim);
  const auto width = static_cast<std::size_t>(table.layout().state_width());
  RowNumber begin = 0;
  for (std::int64_t n = capacity; n == capacity;) {
    const auto room = static_cast<std::size_t>(capacity);
    std::vector<Key> keys(room);
    std::vector<float> weights(room * dim);
    std::vector<float> state(room * width);
    n = table.export_rows(begin, {capacity, keys.data(), weights.data(), state.data()});
    const auto got = static_cast<std::size_t>(n);
    all.keys.insert(all.keys.end(), keys.data(), keys.data() + got);
    all.weights.insert(all.weights.end(), weights.data(), weights.data() + got * dim);
    all.state.insert(all.state.end(), state.data(), state.data() + got * width);
  }
  return all;
}

template <typename AnyTable>
std::vector<float> looked_up(const AnyTable& table, const std::vector<Key>& keys,
                             Outcomes* outcomes = nullptr) {
  std::vector<float> values(keys.size() * static_cast<std::size_t>(table.config().dim));
  Outcomes own(keys.size());
  table.lookup(keys, values.data(), own);
  if (outcomes != nullptr) *outcomes = own;
  return values;
}

// ---- the engine's table as peer ----------------------------------------------------------------

// The same calls to both; ids, row numbers and outcomes must be equal, values within float order.
class Pair {
 public:
  Pair(const TableConfig& config, const DeviceOptions& options)
      : device_(config, options), host_(host_config(config, options)) {}

  void insert(const std::vector<Key>& keys, std::optional<std::int64_t> step) {
    Lease device_lease = step ? device_.lease(step) : Lease();
    Lease host_lease = step ? host_.lease(step) : Lease();
    const Mapped<DeviceTable> got(device_, keys, true, step ? &device_lease : nullptr);
    const Mapped<Table> wanted(host_, keys, true, step ? &host_lease : nullptr);
    compare(got.outcomes, wanted.outcomes);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (has_row(wanted.outcomes[i])) {
        ASSERT_EQ(got.rows[i], wanted.rows[i]);
      }
    }
  }
  void upsert(const std::vector<Key>& keys, const std::vector<float>& values,
              const std::vector<float>* state) {
    Outcomes got(keys.size());
    Outcomes wanted(keys.size());
    device_.upsert(keys, values.data(), state == nullptr ? nullptr : state->data(), got);
    host_.upsert(keys, values.data(), state == nullptr ? nullptr : state->data(), wanted);
    compare(got, wanted);
  }
  void erase(const std::vector<Key>& keys) {
    Outcomes got(keys.size());
    Outcomes wanted(keys.size());
    device_.erase(keys, got);
    host_.erase(keys, wanted);
    compare(got, wanted);
  }
  void apply(const std::vector<Key>& keys, const std::vector<float>& gradients) {
    Outcomes got(keys.size());
    Outcomes wanted(keys.size());
    device_.apply_gradients(keys, gradients.data(), got);
    host_.apply_gradients(keys, gradients.data(), wanted);
    compare(got, wanted);
  }
  void check(const std::vector<Key>& keys) {
    Outcomes got;
    Outcomes wanted;
    const std::vector<float> values = looked_up(device_, keys, &got);
    expect_close(values, looked_up(host_, keys, &wanted), 1e-4F);
    compare(got, wanted);
    const Rows rows = exported(device_);
    const Rows peer = exported(host_);
    ASSERT_EQ(rows.keys, peer.keys);
    expect_close(rows.weights, peer.weights, 1e-4F);
    expect_close(rows.state, peer.state, 1e-4F);
    ASSERT_EQ(device_.size(), host_.size());
    ASSERT_EQ(device_.update_count(), host_.update_count());
    const DeviceTableStats stats = device_.stats();
    const TableStats peers = host_.stats();
    ASSERT_EQ(stats.outcomes[0], peers.outcomes[0]);
    ASSERT_EQ(stats.outcomes[1], peers.outcomes[1]);
    ASSERT_EQ(stats.outcomes[2], peers.outcomes[2]);
    ASSERT_EQ(stats.outcomes[3], peers.outcomes[3]);
    ASSERT_EQ(stats.erased, peers.erased);
    device_.check_invariants();
  }

 private:
  static TableConfig host_config(TableConfig config, const DeviceOptions& options) {
    config.max_rows = options.max_device_rows;
    return config;
  }
  static void compare(const Outcomes& got, const Outcomes& wanted) { ASSERT_EQ(got, wanted); }

  DeviceTable device_;
  Table host_;
};

TEST_P(DeviceTables, DoWhatTheEnginesTableDoes) {
  std::uint64_t seed = 0;
  for (const OptimizerConfig& optimizer : device_optimizers()) {
    const std::int64_t dim = seed % 2 == 0 ? 5 : 16;
    Noise noise(++seed);
    const TableConfig config = config_of(dim, optimizer);
    Pair pair(config, options(60));
    const std::int64_t width = RowLayout::make(dim, optimizer).state_width();
    for (std::int64_t step = 0; step < 25; ++step) {
      const std::int64_t n = noise.below(40);
      const std::vector<Key> keys = noise.keys(n, 90);
      switch (noise.below(6)) {
        case 0:
        case 1:
          pair.insert(keys, noise.below(2) == 0 ? std::optional(step) : std::nullopt);
          break;
        case 2:
          pair.erase(noise.keys(noise.below(10), 90));
          break;
        case 3: {
          std::vector<float> state = noise.values(n * width);
          for (float& x : state) x = std::abs(x);
          pair.upsert(keys, noise.values(n * dim), noise.below(2) == 0 ? &state : nullptr);
          break;
        }
        default:
          pair.apply(keys, noise.values(n * dim));
      }
      if (step % 5 == 4) pair.check(noise.keys(30, 90));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(DeviceTables, InitialRowsAreTheEnginesBitForBit) {
  const std::vector<Key> keys = {0, -1, INT64_MIN, INT64_MAX, 42};
  for (const InitializerConfig& initializer :
       {InitializerConfig::constant(0.25F), InitializerConfig::uniform(-1.0F, 1.0F),
        InitializerConfig::normal(0.0F, 1.0F),
        InitializerConfig::truncated_normal(0.0F, 1.0F, -0.5F, 0.5F)}) {
    TableConfig config = config_of(33);
    config.initializer = initializer;
    DeviceTable device(config, options(10));
    Table host(config);
    std::vector<float> got(keys.size() * 33);
    std::vector<float> wanted(keys.size() * 33);
    device.find_or_insert(keys, got.data());
    host.find_or_insert(keys, wanted.data());
    EXPECT_EQ(got, wanted);
  }
}

TEST_P(DeviceTables, ManyRowsAreMadeAndRead) {
  TableConfig config = config_of(200, OptimizerConfig::adam());  // more than one piece of a copy
  DeviceTable device(config, options(20000));
  Table host(config);
  std::vector<Key> keys(20000);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<Key>(i) * 977;
  std::vector<float> wanted(keys.size() * 200);
  host.find_or_insert(keys, wanted.data());
  const Mapped<DeviceTable> mapped(device, keys, true);
  EXPECT_EQ(looked_up(device, keys), wanted);
  EXPECT_EQ(exported(device, 20001).weights, wanted);
}

// ---- device memory -----------------------------------------------------------------------------

TEST_P(DeviceTables, GatherAndUpdateTakeDeviceMemory) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  for (const OptimizerConfig& optimizer : device_optimizers()) {
    const std::int64_t dim = 12;
    DeviceTable table(config_of(dim, optimizer), options(50));
    DeviceTable peer(config_of(dim, optimizer), {.backend = "cpu", .max_device_rows = 50});
    Noise noise(9);
    for (int round = 0; round < 4; ++round) {
      const std::vector<Key> keys = noise.keys(40, 30);  // many of them equal
      const Mapped<DeviceTable> mapped(table, keys, true);
      const Mapped<DeviceTable> unused(peer, keys, true);
      const std::vector<float> gradients = noise.values(40 * dim);
      const DeviceBuffer memory = copies.up(gradients);
      table.update(mapped.rows, mapped.outcomes, memory.as<float>());
      const DeviceBuffer out(*device, gradients.size() * sizeof(float));
      table.gather(mapped.rows, mapped.outcomes, out.as<float>());
      table.synchronize();
      peer.apply_gradients(keys, gradients.data());
      expect_close(copies.down(out.as<float>(), 40 * dim), looked_up(peer, keys), 1e-4F);
    }
    EXPECT_EQ(table.update_count(), 4U);
  }
}

// One hot key beside others: the order of additions is by halves, whatever the device does.
TEST_P(DeviceTables, SumsOfEqualRowsAreRepeatable) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  Noise noise(5);
  std::vector<Key> keys = noise.keys(100, 20);
  keys.insert(keys.end(), 333, 7);
  const std::vector<float> gradients = noise.values(433 * 3);
  std::vector<std::vector<float>> results;
  for (int run = 0; run < 2; ++run) {
    DeviceTable table(config_of(3, OptimizerConfig::sgd(1.0F)), options(50));
    const Mapped<DeviceTable> mapped(table, keys, true);
    const DeviceBuffer memory = copies.up(gradients);
    table.update(mapped.rows, mapped.outcomes, memory.as<float>());
    table.synchronize();
    results.push_back(looked_up(table, keys));
  }
  EXPECT_EQ(results[0], results[1]);
  Table host(config_of(3, OptimizerConfig::sgd(1.0F)));
  const Mapped<Table> mapped(host, keys, true);
  host.apply_gradients(keys, gradients.data());
  expect_close(results[0], looked_up(host, keys), 1e-4F);
}

TEST_P(DeviceTables, KeysWithoutARowReadTheDefaultAndTakeNoGradient) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  TableConfig config = config_of(4);
  config.default_row.value = 0.5F;
  DeviceTable table(config, options(1));
  const Mapped<DeviceTable> mapped(table, {2, 1}, true);
  EXPECT_EQ(mapped.outcomes, (Outcomes{kInserted, kRefused}));
  const DeviceBuffer gradients = copies.up(std::vector<float>(8, 1.0F));
  table.update(mapped.rows, mapped.outcomes, gradients.as<float>());
  const DeviceBuffer out(*device, 32);
  table.gather(mapped.rows, mapped.outcomes, out.as<float>());
  table.synchronize();
  const std::vector<float> got = copies.down(out.as<float>(), 8);
  EXPECT_EQ(std::vector<float>(got.begin() + 4, got.end()), std::vector<float>(4, 0.5F));
  EXPECT_NE(got[0], 0.5F);
}

TEST_P(DeviceTables, AnUpdateOfNothingAdvancesT) {
  DeviceTable table(config_of(4, OptimizerConfig::adam()), options(1));
  table.update({}, {}, nullptr);
  table.apply_gradients({}, nullptr);
  const Mapped<DeviceTable> missing(table, {8, 9}, false);
  const std::vector<float> gradients(8, 1.0F);
  table.apply_gradients(std::vector<Key>{8, 9}, gradients.data());
  EXPECT_EQ(table.update_count(), 3U);
  table.set_update_count(7);
  EXPECT_EQ(table.update_count(), 7U);
}

TEST_P(DeviceTables, ArraysOfTheDeviceAreChecked) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  DeviceTable table(config_of(4), options(4));
  const Mapped<DeviceTable> mapped(table, {1, 2}, true);
  const DeviceBuffer memory(*device, 256);
  const std::vector<RowNumber> wrong = {0, 17};
  EXPECT_THROW(table.gather(mapped.rows, mapped.outcomes, nullptr), std::invalid_argument);
  EXPECT_THROW(table.gather(mapped.rows, mapped.outcomes, memory.as<float>() + 1),
               std::invalid_argument);
  EXPECT_THROW(table.update(wrong, mapped.outcomes, memory.as<float>()), std::invalid_argument);
  EXPECT_THROW(table.update(std::vector<RowNumber>{0}, mapped.outcomes, memory.as<float>()),
               std::invalid_argument);
}

// ---- the budget --------------------------------------------------------------------------------

TEST_P(DeviceTables, AFullDeviceRefusesUntilKeysLeave) {
  DeviceTable table(config_of(4), options(3));
  const Mapped<DeviceTable> first(table, {1, 2, 4, 3, 3, 1}, true);
  EXPECT_EQ(first.outcomes,
            (Outcomes{kInserted, kInserted, kInserted, kRefused, kRefused, kFound}));
  EXPECT_EQ(table.size(), 3);
  table.erase(std::vector<Key>{2});
  EXPECT_EQ(Mapped<DeviceTable>(table, {2, 3}, true).outcomes, (Outcomes{kInserted, kRefused}));
  const DeviceTableStats stats = table.stats();
  EXPECT_EQ(stats.outcomes[static_cast<int>(kRefused)], 3U);
  table.clear();
  EXPECT_EQ(Mapped<DeviceTable>(table, {9}, true).outcomes, (Outcomes{kInserted}));
  table.check_invariants();
}

TEST_P(DeviceTables, MaxRowsBelowTheBudgetRefuses) {
  TableConfig config = config_of(4);
  config.max_rows = 1;
  DeviceTable table(config, options(3));
  EXPECT_EQ(Mapped<DeviceTable>(table, {2, 1}, true).outcomes, (Outcomes{kInserted, kRefused}));
  std::vector<float> values(8);
  Outcomes outcomes(2);
  table.find_or_insert(std::vector<Key>{2, 1}, values.data(), outcomes);
  EXPECT_EQ(outcomes, (Outcomes{kFound, kRefused}));
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(kRefused)], 2U);
}

TEST_P(DeviceTables, AFullTableThatRaisesChangesNothing) {
  TableConfig config = config_of(4);
  config.on_full = OnFull::kRaise;
  DeviceTable table(config, options(2));
  insert(table, {1});
  EXPECT_THROW(insert(table, {2, 3}), Error);
  EXPECT_EQ(table.stats().num_rows, 1);
  table.check_invariants();
  insert(table, {3});
  EXPECT_EQ(Mapped<DeviceTable>(table, {1, 3, 2}, false).outcomes,
            (Outcomes{kFound, kFound, kMissing}));
}

TEST_P(DeviceTables, ARowGivenToAnotherKeyStartsAnew) {
  const TableConfig config = config_of(4, OptimizerConfig::adagrad());
  DeviceTable table(config, options(1));
  insert(table, {1});
  const std::vector<float> gradients(4, 1.0F);
  table.apply_gradients(std::vector<Key>{1}, gradients.data());
  table.erase(std::vector<Key>{1});
  insert(table, {2});
  Table fresh(config);
  insert(fresh, {2});
  EXPECT_EQ(exported(table).weights, exported(fresh).weights);
  EXPECT_EQ(exported(table).state, std::vector<float>(4, 0.0F));
}

TEST_P(DeviceTables, RowsSwappedOutAndInGoOnTraining) {
  const TableConfig config = config_of(6, OptimizerConfig::adam(0.1F));
  DeviceTable table(config, options(10));
  DeviceTable undisturbed(config, options(10));
  Noise noise(6);
  const std::vector<Key> keys = {1, 2, 3};
  for (int round = 0; round < 4; ++round) {
    const std::vector<float> gradients = noise.values(18);
    insert(table, keys);
    insert(undisturbed, keys);
    table.apply_gradients(keys, gradients.data());
    undisturbed.apply_gradients(keys, gradients.data());
    std::vector<float> weights(18);
    std::vector<float> state(36);
    table.read_rows(keys, weights.data(), state.data());
    table.erase(keys);
    table.upsert(keys, weights.data(), state.data());
  }
  EXPECT_EQ(looked_up(table, keys), looked_up(undisturbed, keys));
}

// ---- leases, initializers, configuration -------------------------------------------------------

TEST_P(DeviceTables, ABatchInFlightIsHiddenFromReaders) {
  DeviceTable table(config_of(4), options(10));
  Lease lease = table.lease(1);
  EXPECT_EQ(Mapped<DeviceTable>(table, {1}, true, &lease).outcomes, (Outcomes{kInserted}));
  Outcomes outcomes;
  looked_up(table, {1}, &outcomes);
  EXPECT_EQ(outcomes, (Outcomes{kMissing}));
  EXPECT_EQ(table.size(), 0);
  EXPECT_EQ(table.stats().num_rows_in_flight, 1);
  const std::vector<float> values(4);
  EXPECT_THROW(table.upsert(std::vector<Key>{5}, values.data()), Error);
  lease.release();
  looked_up(table, {1}, &outcomes);
  EXPECT_EQ(outcomes, (Outcomes{kFound}));
}

TEST_P(DeviceTables, NoRowLiesBeyondTheDeviceWhileALeaseKeepsRowsBack) {
  DeviceTable table(config_of(2), options(2));
  insert(table, {0, 1});
  const Lease lease = table.lease();
  table.erase(std::vector<Key>{0});
  const std::vector<float> values(2);
  EXPECT_THROW(insert(table, {10}), Error);
  EXPECT_THROW(table.upsert(std::vector<Key>{10}, values.data()), Error);
  table.check_invariants();
}

TEST_P(DeviceTables, ALeaseMayOutliveItsTable) {
  Lease lease;
  {
    DeviceTable table(config_of(4), options(10));
    lease = table.lease(1);
    insert(table, {1}, &lease);
  }
  lease.release();
}

TEST_P(DeviceTables, ACustomInitializerThatThrowsInsertsNothing) {
  TableConfig config = config_of(2);
  config.initializer = InitializerConfig::custom([](std::span<const Key> keys, float* values) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] == 13) throw Error(ErrorCode::kInternal, "no 13");
      values[2 * i] = values[2 * i + 1] = static_cast<float>(keys[i]);
    }
  });
  DeviceTable table(config, options(10));
  insert(table, {5});
  std::vector<float> values(4);
  EXPECT_THROW(table.find_or_insert(std::vector<Key>{6, 13}, values.data()), Error);
  EXPECT_EQ(table.size(), 1);
  EXPECT_EQ(looked_up(table, {5, 6}), (std::vector<float>{5.0F, 5.0F, 0.0F, 0.0F}));
  table.check_invariants();
}

TEST_P(DeviceTables, WhatADeviceDoesNotHaveIsRefused) {
  const auto refuses = [&](TableConfig config, DeviceOptions where) {
    EXPECT_THROW(DeviceTable(std::move(config), std::move(where)), std::invalid_argument);
  };
  refuses(config_of(4), options(0));
  refuses(config_of(4), {.backend = "tpu", .max_device_rows = 1});
  refuses(config_of(0), options(1));
  for (const OptimizerConfig& optimizer :
       {OptimizerConfig::ftrl(), OptimizerConfig::lamb(), OptimizerConfig::rmsprop(),
        OptimizerConfig::partial_rowwise_adam()}) {
    refuses(config_of(4, optimizer), options(1));
  }
  OptimizerConfig clipped = OptimizerConfig::sgd();
  clipped.clip_norm = 1.0F;
  refuses(config_of(4, clipped), options(1));
  TableConfig half = config_of(4);
  half.weight_dtype = DType::kBFloat16;
  refuses(half, options(1));
  TableConfig counting = config_of(4);
  counting.on_nonfinite = NonFinite::kSkip;
  refuses(counting, options(1));
}

TEST_P(DeviceTables, MemoryIsTakenAtOnceAndTold) {
  DeviceTable table(config_of(16, OptimizerConfig::adam()), options(1000));
  EXPECT_GE(table.stats().device_bytes, 3 * 1001 * 64);
  EXPECT_EQ(table.stream() == nullptr, std::string(GetParam().backend) == "cpu");
}

}  // namespace
}  // namespace recsdk::test::device_table_test
