// Each call of Ascend's runtime fails in turn, in the stand-in: what an operation has taken is
// freed, its table is as it was and goes on.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/backend.h"
#include "backends/npu/acl_library.h"
#include "device_test_support.h"
#include "profile.h"
#include "recsdk/device_table.h"

namespace recsdk::test::device_faults_test {
namespace {

using internal::CurrentDevice;
using internal::Device;
using internal::DeviceBuffer;

constexpr int kSomeError = 507899;  // ACL_ERROR_RT_INTERNAL_ERROR
constexpr std::int64_t kDim = 6;

class DeviceFaults : public DeviceTest {
 protected:
  void SetUp() override {
    if (is_hardware()) GTEST_SKIP() << "only the stand-in fails on demand";
    DeviceTest::SetUp();
  }
};

std::vector<DeviceCase> fake_cases() {
  return {{"npu_lazy", "npu", true, kFakeAclLazy}, {"npu_eager", "npu", true, kFakeAclEager}};
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceFaults, ::testing::ValuesIn(fake_cases()), name_of);

TableConfig config_of(const OptimizerConfig& optimizer) {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = optimizer;
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  return config;
}

/// Everything that a failed call must leave as it was.
struct Snapshot {
  explicit Snapshot(const DeviceTable& table) {
    const DeviceTableStats stats = table.stats();
    counters.assign(std::begin(stats.outcomes), std::end(stats.outcomes));
    counters.insert(counters.end(), {static_cast<std::uint64_t>(stats.num_rows),
                                     static_cast<std::uint64_t>(stats.num_rows_in_flight),
                                     stats.erased, stats.updates});
    keys.resize(64);
    weights.resize(64 * static_cast<std::size_t>(kDim));
    state.resize(64 * static_cast<std::size_t>(table.layout().state_width()));
    RowNumber begin = 0;
    const std::int64_t n =
        table.export_rows(begin, {64, keys.data(), weights.data(), state.data()});
    keys.resize(static_cast<std::size_t>(n));
    table.check_invariants();
  }
  bool operator==(const Snapshot&) const = default;

  std::vector<std::uint64_t> counters;
  std::vector<Key> keys;
  std::vector<float> weights;
  std::vector<float> state;
};

/// A table with some rows, and memory of the device with gradients.
struct Scene {
  Scene() {
    const CurrentDevice current(*device);
    gradients = Copies(*device).up(Noise(2).values(6 * kDim));
    out = DeviceBuffer(*device, sizeof(float) * 6 * kDim);
  }
  ~Scene() {
    const CurrentDevice current(*device);
    table.reset();
    gradients = {};
    out = {};
  }

  void make_table(const OptimizerConfig& optimizer) {
    table = std::make_unique<DeviceTable>(config_of(optimizer),
                                          DeviceOptions{.backend = "npu", .max_device_rows = 40});
    const std::vector<Key> known = {1, 2, 3, 4};
    std::vector<float> values(known.size() * static_cast<std::size_t>(kDim));
    table->find_or_insert(known, values.data());
    table->apply_gradients(known, values.data());
    rows.resize(6);
    outcomes.resize(6);
    table->map(std::vector<Key>{1, 2, 3, 1, 1, 99}, rows, outcomes);
  }

  std::shared_ptr<Device> device = internal::open_device("npu", 0);
  DeviceBuffer gradients;
  DeviceBuffer out;
  std::unique_ptr<DeviceTable> table;
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

struct Operation {
  const char* name;
  std::function<void(Scene&)> run;
};

std::vector<Operation> operations() {
  const auto values = [] { return Noise(1).values(4 * kDim); };
  return {
      {"map",
       [](Scene& s) {
         std::vector<RowNumber> rows(3);
         std::vector<Outcome> outcomes(3);
         s.table->map(std::vector<Key>{7, 8, 1}, rows, outcomes, {true});
       }},
      {"map in flight",
       [](Scene& s) {
         const Lease lease = s.table->lease(9);
         std::vector<RowNumber> rows(3);
         std::vector<Outcome> outcomes(3);
         s.table->map(std::vector<Key>{7, 8, 1}, rows, outcomes, {true, &lease});
       }},
      {"find_or_insert",
       [=](Scene& s) {
         std::vector<float> got = values();
         s.table->find_or_insert(std::vector<Key>{7, 8, 1, 7}, got.data());
       }},
      {"upsert", [=](Scene& s) { s.table->upsert(std::vector<Key>{1, 7, 2, 1}, values().data()); }},
      {"lookup",
       [=](Scene& s) {
         std::vector<float> got = values();
         s.table->lookup(std::vector<Key>{1, 50}, got.data());
       }},
      {"apply_gradients",
       [=](Scene& s) { s.table->apply_gradients(std::vector<Key>{1, 2, 1, 60}, values().data()); }},
      {"update", [](Scene& s) { s.table->update(s.rows, s.outcomes, s.gradients.as<float>()); }},
      {"gather", [](Scene& s) { s.table->gather(s.rows, s.outcomes, s.out.as<float>()); }},
      {"synchronize", [](Scene& s) { s.table->synchronize(); }},
  };
}

// What the operation makes of an undisturbed table.
Snapshot undisturbed(const Operation& operation, const OptimizerConfig& optimizer) {
  Scene scene;
  scene.make_table(optimizer);
  operation.run(scene);
  return Snapshot(*scene.table);
}

// False once the operation makes no n-th call.
bool fails_at(std::int64_t n, const Operation& operation, const OptimizerConfig& optimizer,
              const Snapshot& wanted) {
  Scene scene;
  scene.make_table(optimizer);
  const Snapshot before(*scene.table);
  bool has_thrown = false;
  fake_acl().fail(n, kSomeError, false);
  try {
    operation.run(scene);
  } catch (const Error& error) {
    has_thrown = true;
    const bool is_known =
        error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kOutOfMemory;
    EXPECT_TRUE(is_known) << error.what();
  }
  const std::string failed = fake_acl().failed_call();
  fake_acl().fail(-1, 0, false);
  SCOPED_TRACE(std::string(operation.name) + ", call " + std::to_string(n) + ", " + failed);
  if (has_thrown) {
    EXPECT_TRUE(Snapshot(*scene.table) == before) << "a failed call has changed something";
    operation.run(scene);  // and now it succeeds
  }
  EXPECT_TRUE(Snapshot(*scene.table) == wanted) << "the table does not go on";
  return !failed.empty();
}

TEST_P(DeviceFaults, AnyCallOfAnyOperationMayFail) {
  // Those with a column and two matrices of state; without and with one matrix.
  const bool is_lazy = GetParam().work == kFakeAclLazy;
  for (const OptimizerConfig& optimizer :
       is_lazy ? std::array{OptimizerConfig::rowwise_adagrad(), OptimizerConfig::adam()}
               : std::array{OptimizerConfig::sgd(), OptimizerConfig::adagrad()}) {
    for (const Operation& operation : operations()) {
      const Snapshot wanted = undisturbed(operation, optimizer);
      // Or every second one: the odd ones of a lazy device, the even ones of an eager one.
      const std::int64_t step = is_full_profile() ? 1 : 2;
      std::int64_t n = !is_full_profile() && is_lazy ? 1 : 0;
      while (fails_at(n, operation, optimizer, wanted)) n += step;
      EXPECT_GT(n, 0) << operation.name;
      ASSERT_STREQ(fake_acl().violations(), "") << operation.name;
      ASSERT_STREQ(fake_acl().live(), "") << operation.name;
      if (HasFailure()) return;
    }
  }
}

// Each on a thread that has no context of the device yet.
TEST_P(DeviceFaults, AnyThreadMayCall) {
  for (const Operation& operation : operations()) {
    Scene scene;
    scene.make_table(OptimizerConfig::adagrad());
    std::thread([&] { operation.run(scene); }).join();
    std::thread([&] { scene.table.reset(); }).join();
    ASSERT_STREQ(fake_acl().violations(), "") << operation.name;
  }
}

TEST_P(DeviceFaults, AnyCallOfMakingATableMayFail) {
  const auto make = [] {
    const DeviceTable table(config_of(OptimizerConfig::adam()),
                            {.backend = "npu", .max_device_rows = 4});
  };
  std::int64_t n = 0;
  for (;; ++n) {
    bool has_thrown = false;
    fake_acl().fail(n, kSomeError, false);
    try {
      make();
    } catch (const Error&) {
      has_thrown = true;
    }
    const std::string failed = fake_acl().failed_call();
    fake_acl().fail(-1, 0, false);
    SCOPED_TRACE("call " + std::to_string(n) + ", " + failed);
    ASSERT_STREQ(fake_acl().violations(), "");
    ASSERT_STREQ(fake_acl().live(), "");
    if (!has_thrown && failed.empty()) break;
    make();
  }
  EXPECT_GT(n, 20);
}

// With work that is not done yet, whose memory goes with the table.
TEST_P(DeviceFaults, AnyCallOfEndingATableMayFail) {
  for (std::int64_t n = 0;; ++n) {
    Scene scene;
    scene.make_table(OptimizerConfig::adam());
    scene.table->update(scene.rows, scene.outcomes, scene.gradients.as<float>());
    fake_acl().fail(n, kSomeError, false);
    scene.table.reset();
    const std::string failed = fake_acl().failed_call();
    fake_acl().fail(-1, 0, false);
    SCOPED_TRACE("call " + std::to_string(n) + ", " + failed);
    ASSERT_STREQ(fake_acl().violations(), "");
    ASSERT_STREQ(fake_acl().live(), "2 of device memory, 1 of devices");  // the scene's
    if (failed.empty()) break;
  }
}

TEST_P(DeviceFaults, AThreadKeepsTheContextThatItHas) {
  fake_acl().set_num_devices(2);
  Scene scene;
  scene.make_table(OptimizerConfig::sgd());
  std::thread([&] {
    const internal::acl::Library& library = internal::acl::library();
    ASSERT_EQ(library.aclrtSetDevice(1), 0);
    internal::acl::Context own = nullptr;
    internal::acl::Context after = nullptr;
    library.aclrtGetCurrentContext(&own);
    operations()[0].run(scene);
    library.aclrtGetCurrentContext(&after);
    EXPECT_EQ(own, after);
    library.aclrtResetDevice(1);
  }).join();
}

// Between the parts of an update nothing can be undone any more: the table says so, for good.
TEST_P(DeviceFaults, ADeviceThatFailsForGoodLeavesATableThatSaysSo) {
  bool was_broken = false;
  for (std::int64_t n = 0;; ++n) {
    Scene scene;
    scene.make_table(OptimizerConfig::adam());
    fake_acl().fail(n, kSomeError, true);
    bool has_thrown = false;
    try {
      scene.table->update(scene.rows, scene.outcomes, scene.gradients.as<float>());
    } catch (const Error&) {
      has_thrown = true;
    }
    fake_acl().fail(-1, 0, false);
    try {
      scene.table->synchronize();
      std::vector<float> values(static_cast<std::size_t>(kDim));
      scene.table->lookup(std::vector<Key>{1}, values.data());
    } catch (const Error& error) {
      was_broken = true;
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_NE(std::string(error.what()).find("half updated"), std::string::npos);
    }
    if (!has_thrown) break;
  }
  EXPECT_TRUE(was_broken);
}

TEST_P(DeviceFaults, ATableThatDoesNotFitSaysHowMuchItWanted) {
  {
    const DeviceTable any(config_of(OptimizerConfig::sgd()), {"npu", 0, 1});
  }
  fake_acl().limit_memory(100000);
  try {
    const DeviceTable table(config_of(OptimizerConfig::adam()), {"npu", 0, 10000});
    FAIL() << "there was room";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("aclrtMalloc of 240024 bytes"), std::string::npos)
        << error.what();
  }
}

TEST_P(DeviceFaults, AMachineWithoutDevicesHasNoBackend) {
  fake_acl().set_num_devices(0);
  try {
    require_backend("npu");
    FAIL() << "there is a device";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBackendUnavailable);
  }
}

/// On the stand-in that does no work before it must.
class LazyDevices : public DeviceFaults {};

INSTANTIATE_TEST_SUITE_P(Backends, LazyDevices,
                         ::testing::Values(DeviceCase{"npu_lazy", "npu", true, kFakeAclLazy}),
                         name_of);

// Work is only handed over, and done on another thread when it is waited for.
TEST_P(LazyDevices, CallsReturnBeforeTheirWorkIsDone) {
  Scene scene;
  scene.make_table(OptimizerConfig::adagrad());
  scene.table->synchronize();
  const std::int64_t done = fake_acl().num_done();
  scene.table->update(scene.rows, scene.outcomes, scene.gradients.as<float>());
  scene.table->gather(scene.rows, scene.outcomes, scene.out.as<float>());
  EXPECT_EQ(fake_acl().num_done(), done);
  EXPECT_GT(fake_acl().num_waiting(), 5);
  scene.table->synchronize();
  EXPECT_EQ(fake_acl().num_waiting(), 0);
}

}  // namespace
}  // namespace recsdk::test::device_faults_test
