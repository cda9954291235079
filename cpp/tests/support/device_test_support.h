// What tests of devices share: the cases they run in, the stand-in for Ascend's runtime, values of
// rows.
//
// With RECSDK_TEST_NPU_HARDWARE set the backend "npu" is Ascend's, and the stand-in is not loaded.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "fake_acl/fake_acl.h"
#include "optimizer_updates.h"
#include "recsdk/recsdk.h"

namespace recsdk::test {

inline bool is_hardware() { return std::getenv("RECSDK_TEST_NPU_HARDWARE") != nullptr; }

/// The stand-in's functions.
struct FakeAcl {
  decltype(&fake_acl_reset) reset;
  decltype(&fake_acl_violations) violations;
  decltype(&fake_acl_live) live;
  decltype(&fake_acl_num_calls) num_calls;
  decltype(&fake_acl_fail) fail;
  decltype(&fake_acl_failed_call) failed_call;
  decltype(&fake_acl_limit_memory) limit_memory;
  decltype(&fake_acl_set_num_devices) set_num_devices;
  decltype(&fake_acl_num_done) num_done;
  decltype(&fake_acl_num_waiting) num_waiting;
};

/// Loads the stand-in, and has the engine load it too.
inline const FakeAcl& fake_acl() {
  static const FakeAcl loaded = [] {
    setenv("RECSDK_ACL_LIBRARY", RECSDK_FAKE_ACL, 1);
    void* const library = dlopen(RECSDK_FAKE_ACL, RTLD_NOW | RTLD_LOCAL);
    FakeAcl found{};
    const auto find = [library](const char* name, auto& function) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find("fake_acl_reset", found.reset);
    find("fake_acl_violations", found.violations);
    find("fake_acl_live", found.live);
    find("fake_acl_num_calls", found.num_calls);
    find("fake_acl_fail", found.fail);
    find("fake_acl_failed_call", found.failed_call);
    find("fake_acl_limit_memory", found.limit_memory);
    find("fake_acl_set_num_devices", found.set_num_devices);
    find("fake_acl_num_done", found.num_done);
    find("fake_acl_num_waiting", found.num_waiting);
    return found;
  }();
  return loaded;
}

struct DeviceCase {
  const char* name;
  const char* backend;
  bool is_fake;
  FakeAclWork work;
};

inline std::ostream& operator<<(std::ostream& out, const DeviceCase& device_case) {
  return out << device_case.name;
}

inline std::vector<DeviceCase> device_cases() {
  const DeviceCase cpu{"cpu", "cpu", false, kFakeAclLazy};
  if (is_hardware()) return {cpu, {"npu", "npu", false, kFakeAclLazy}};
  return {cpu, {"npu_lazy", "npu", true, kFakeAclLazy}, {"npu_eager", "npu", true, kFakeAclEager}};
}

inline std::string name_of(const ::testing::TestParamInfo<DeviceCase>& info) {
  return info.param.name;
}

/// A test in one case. Where the stand-in is used, ends with nothing broken and nothing left.
class DeviceTest : public ::testing::TestWithParam<DeviceCase> {
 protected:
  void SetUp() override {
    if (GetParam().is_fake) fake_acl().reset(GetParam().work);
  }
  void TearDown() override {
    if (!GetParam().is_fake) return;
    EXPECT_STREQ(fake_acl().violations(), "");
    EXPECT_STREQ(fake_acl().live(), "");
  }

  std::shared_ptr<internal::Device> open() const {
    return internal::open_device(GetParam().backend, 0);
  }
  DeviceOptions options(std::int64_t max_device_rows) const {
    return {.backend = GetParam().backend, .device = 0, .max_device_rows = max_device_rows};
  }
};

/// Numbers of no meaning, the same in every run.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed * 2 + 1) {}

  std::uint64_t next() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return state_ >> 33U;
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(limit));
  }
  /// Within [-1, 1).
  float value() { return static_cast<float>(below(1 << 20)) / static_cast<float>(1 << 19) - 1.0F; }
  std::vector<float> values(std::int64_t count) {
    std::vector<float> made(static_cast<std::size_t>(count));
    for (float& x : made) x = value();
    return made;
  }
  std::vector<Key> keys(std::int64_t count, std::int64_t limit) {
    std::vector<Key> made(static_cast<std::size_t>(count));
    for (Key& key : made) key = below(limit) - limit / 2;
    return made;
  }

 private:
  std::uint64_t state_;
};

/// The optimizers that a device has, in each of their forms and ways to decay.
inline std::vector<OptimizerConfig> device_optimizers() {
  std::vector<OptimizerConfig> found;
  for (const test::OptimizerCase& one : test::optimizer_cases()) {
    if (one.tables.count("DeviceTable") != 0) found.push_back(one.config);
  }
  return found;
}

/// Arrays of the host in device memory and back, by a stream of their own.
class Copies {
 public:
  explicit Copies(internal::Device& device) : device_(device), stream_(device.make_stream()) {}

  template <typename T>
  internal::DeviceBuffer up(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    internal::DeviceBuffer memory(device_, bytes + 1);
    const internal::PinnedBuffer pinned(device_, bytes + 1);
    std::copy(values.begin(), values.end(), pinned.template as<T>());
    stream_->copy_to_device(memory.data(), pinned.data(), bytes);
    stream_->synchronize();
    return memory;
  }
  std::vector<float> down(const float* from, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
    const internal::PinnedBuffer pinned(device_, bytes + 1);
    stream_->copy_to_host(pinned.data(), from, bytes);
    stream_->synchronize();
    return {pinned.as<float>(), pinned.as<float>() + count};
  }

 private:
  internal::Device& device_;
  std::unique_ptr<internal::DeviceStream> stream_;
};

inline void expect_close(const std::vector<float>& got, const std::vector<float>& wanted,
                         float tolerance = 1e-5F) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float scale = std::max(1.0F, std::abs(wanted[i]));
    ASSERT_NEAR(got[i], wanted[i], tolerance * scale) << "at " << i;
  }
}

}  // namespace recsdk::test
