// The stand-in for Ascend's runtime finds the mistakes that it is there to find: each is planted
// here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "backends/npu/acl_library.h"
#include "device_test_support.h"

namespace recsdk::test::fake_acl_test {
namespace {

namespace acl = internal::acl;
using acl::DataType;
using acl::Library;
using acl::MemcpyKind;
using acl::Status;

constexpr auto kPolicy = acl::MemMallocPolicy::kHugeFirst;

class FakeAclTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (is_hardware()) GTEST_SKIP() << "the stand-in is not loaded";
    fake_acl().reset(kFakeAclLazy);
    ASSERT_EQ(api().aclrtSetDevice(0), acl::kSuccess);
    ASSERT_EQ(api().aclrtCreateStream(&stream_), acl::kSuccess);
    ASSERT_EQ(api().aclrtMalloc(&memory_, 256, kPolicy), acl::kSuccess);
    ASSERT_EQ(api().aclrtMallocHost(&pinned_, 256), acl::kSuccess);
  }
  void TearDown() override {
    if (is_hardware()) return;
    api().aclrtSynchronizeStream(stream_);
    if (memory_ != nullptr) api().aclrtFree(memory_);
    if (pinned_ != nullptr) api().aclrtFreeHost(pinned_);
    api().aclrtDestroyStream(stream_);
    api().aclrtResetDevice(0);
    EXPECT_STREQ(fake_acl().live(), "");
  }

  static const Library& api() {
    fake_acl();
    const Library& library = acl::library();
    static const Status initialized = library.aclInit(nullptr);
    static_cast<void>(initialized);
    return library;
  }

  Status copy_up(void* to, const void* from, std::size_t bytes) {
    return api().aclrtMemcpyAsync(to, bytes, from, bytes, MemcpyKind::kHostToDevice, stream_);
  }
  Status copy_down(void* to, const void* from, std::size_t bytes) {
    return api().aclrtMemcpyAsync(to, bytes, from, bytes, MemcpyKind::kDeviceToHost, stream_);
  }
  acl::Tensor* tensor(std::size_t offset, std::int64_t rows, std::int64_t width,
                      DataType dtype = DataType::kFloat) {
    const std::int64_t dims[2] = {rows, width};
    const std::int64_t strides[2] = {width, 1};
    return api().aclCreateTensor(dims, 2, dtype, strides, 0, acl::Format::kNd, dims, 2,
                                 static_cast<std::byte*>(memory_) + offset);
  }
  static void expect_violation(const std::string& what) {
    const std::string found = fake_acl().violations();
    EXPECT_NE(found.find(what), std::string::npos) << "found: " << found;
  }

  acl::Stream stream_ = nullptr;
  void* memory_ = nullptr;
  void* pinned_ = nullptr;
};

using FakeAclDeathTest = FakeAclTest;

TEST_F(FakeAclDeathTest, TheHostCannotTouchDeviceMemory) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(*static_cast<volatile float*>(memory_) = 1.0F, "");
}

TEST_F(FakeAclDeathTest, TheHostCannotReadBeforeTheStreamIsSynchronized) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  ASSERT_EQ(copy_down(pinned_, memory_, 256), acl::kSuccess);
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(pinned_)), "");
  ASSERT_EQ(api().aclrtSynchronizeStream(stream_), acl::kSuccess);
  static_cast<void>(*static_cast<volatile float*>(pinned_));
}

TEST_F(FakeAclDeathTest, NorThoughTheCopyHasLongBeenDone) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  fake_acl().reset(kFakeAclEager);
  ASSERT_EQ(copy_down(pinned_, memory_, 256), acl::kSuccess);
  while (fake_acl().num_waiting() != 0) std::this_thread::yield();
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile float*>(pinned_)), "");
}

TEST_F(FakeAclDeathTest, TheHostCannotOverwriteWhatIsYetToBeCopied) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  ASSERT_EQ(copy_up(memory_, pinned_, 256), acl::kSuccess);
  EXPECT_DEATH(*static_cast<volatile float*>(pinned_) = 1.0F, "");
}

TEST_F(FakeAclTest, WorkIsDoneOnAnotherThreadAndOnlyWhenWaitedFor) {
  const std::int64_t before = fake_acl().num_done();
  *static_cast<float*>(pinned_) = 3.0F;
  ASSERT_EQ(copy_up(memory_, pinned_, 4), acl::kSuccess);
  EXPECT_EQ(fake_acl().num_done(), before);
  EXPECT_EQ(fake_acl().num_waiting(), 1);
  api().aclrtSynchronizeStream(stream_);
  EXPECT_EQ(fake_acl().num_done(), before + 1);
}

TEST_F(FakeAclTest, AThreadWithoutAContextIsToldOff) {
  std::thread([&] { EXPECT_NE(api().aclrtSynchronizeStream(stream_), acl::kSuccess); }).join();
  expect_violation("aclrtSynchronizeStream without a context");
}

TEST_F(FakeAclTest, MemoryThatWorkNeedsMustNotBeFreed) {
  ASSERT_EQ(copy_up(memory_, pinned_, 64), acl::kSuccess);
  api().aclrtFreeHost(pinned_);
  pinned_ = nullptr;
  expect_violation("aclrtFreeHost of memory that work needs");
  // The work that is left would now use memory that is gone.
  api().aclrtDestroyStreamForce(stream_);
  api().aclrtCreateStream(&stream_);
}

TEST_F(FakeAclTest, AStreamIsDestroyedIdle) {
  ASSERT_EQ(copy_up(memory_, pinned_, 64), acl::kSuccess);
  api().aclrtDestroyStream(stream_);
  expect_violation("aclrtDestroyStream before its work was done");
  api().aclrtCreateStream(&stream_);
}

TEST_F(FakeAclTest, AddressesOfCopiesAndTensorsAreAligned) {
  auto* const odd = static_cast<std::byte*>(memory_) + 4;
  EXPECT_NE(copy_up(odd, pinned_, 4), acl::kSuccess);
  expect_violation("aclrtMemcpyAsync of addresses that are not 64-byte aligned");
  EXPECT_EQ(tensor(4, 1, 1), nullptr);
  expect_violation("aclCreateTensor at an address that is not 64-byte aligned");
}

TEST_F(FakeAclTest, TensorsLieInDeviceMemory) {
  EXPECT_EQ(tensor(0, 100, 100), nullptr);
  expect_violation("aclCreateTensor of no device memory");
}

// An operator that multiplies in place, with its descriptors.
struct Scaling {
  Scaling(const Library& library, acl::Tensor* tensor) : self(tensor) {
    float two = 2.0F;
    factor = library.aclCreateScalar(&two, DataType::kFloat);
    EXPECT_EQ(library.aclnnInplaceMuls.get_workspace_size(self, factor, &bytes, &executor),
              acl::kSuccess);
  }
  acl::Tensor* self;
  acl::Scalar* factor;
  std::uint64_t bytes = 0;
  acl::OpExecutor* executor = nullptr;
};

TEST_F(FakeAclTest, AnExecutorIsLaunchedOnce) {
  Scaling scaling(api(), tensor(0, 2, 2));
  void* const workspace = static_cast<std::byte*>(memory_) + 128;
  scaling.bytes = std::min<std::uint64_t>(scaling.bytes, 128);
  const auto launch = [&] {
    return api().aclnnInplaceMuls.launch(workspace, scaling.bytes, scaling.executor, stream_);
  };
  launch();
  EXPECT_NE(launch(), acl::kSuccess);
  expect_violation("aclnnInplaceMuls with an executor that was launched or destroyed");
  api().aclDestroyTensor(scaling.self);
  api().aclDestroyScalar(scaling.factor);
}

TEST_F(FakeAclTest, DescriptorsLiveUntilTheLaunch) {
  Scaling scaling(api(), tensor(0, 2, 2));
  api().aclDestroyTensor(scaling.self);
  void* workspace = nullptr;
  if (scaling.bytes != 0) {
    ASSERT_EQ(api().aclrtMalloc(&workspace, scaling.bytes, kPolicy), acl::kSuccess);
  }
  EXPECT_NE(api().aclnnInplaceMuls.launch(workspace, scaling.bytes, scaling.executor, stream_),
            acl::kSuccess);
  expect_violation("aclnnInplaceMuls after a descriptor was destroyed");
  api().aclDestroyScalar(scaling.factor);
  if (workspace != nullptr) api().aclrtFree(workspace);
}

TEST_F(FakeAclTest, ASecondPhaseBelongsToItsFirst) {
  Scaling scaling(api(), tensor(0, 2, 2));
  EXPECT_NE(api().aclnnSqrt.launch(nullptr, scaling.bytes, scaling.executor, stream_),
            acl::kSuccess);
  expect_violation("aclnnSqrt with an executor of aclnnInplaceMuls");
  api().aclDestroyTensor(scaling.self);
  api().aclDestroyScalar(scaling.factor);
}

TEST_F(FakeAclTest, WhatIsNotGivenBackIsCounted) {
  Scaling scaling(api(), tensor(0, 2, 2));
  EXPECT_STREQ(fake_acl().live(),
               "1 of device memory, 1 of pinned memory, 1 of streams, 1 of tensors, 1 of scalars, "
               "1 of executors, 1 of devices");
  api().aclDestroyAclOpExecutor(scaling.executor);
  api().aclDestroyTensor(scaling.self);
  api().aclDestroyScalar(scaling.factor);
}

TEST_F(FakeAclTest, ADeviceIsResetAsOftenAsItWasSet) {
  std::thread([] {
    api().aclrtSetDevice(0);
    api().aclrtResetDevice(0);
  }).join();
  EXPECT_STREQ(fake_acl().violations(), "");
}

TEST_F(FakeAclTest, EqualRowsMustNotBeWrittenByOneOperator) {
  *static_cast<std::int64_t*>(pinned_) = 1;
  static_cast<std::int64_t*>(pinned_)[1] = 1;
  ASSERT_EQ(copy_up(memory_, pinned_, 16), acl::kSuccess);
  api().aclrtSynchronizeStream(stream_);
  const std::int64_t dims[1] = {2};
  const std::int64_t stride[1] = {1};
  acl::Tensor* const index = api().aclCreateTensor(dims, 1, DataType::kInt64, stride, 0,
                                                   acl::Format::kNd, dims, 1, memory_);
  acl::Tensor* const self = tensor(64, 4, 2);
  acl::Tensor* const source = tensor(128, 2, 2);
  std::uint64_t bytes = 0;
  acl::OpExecutor* executor = nullptr;
  ASSERT_EQ(
      api().aclnnInplaceIndexCopy.get_workspace_size(self, 0, index, source, &bytes, &executor),
      acl::kSuccess);
  void* workspace = nullptr;
  if (bytes != 0) {
    ASSERT_EQ(api().aclrtMalloc(&workspace, bytes, kPolicy), acl::kSuccess);
  }
  EXPECT_EQ(api().aclnnInplaceIndexCopy.launch(workspace, bytes, executor, stream_), acl::kSuccess);
  api().aclrtSynchronizeStream(stream_);
  expect_violation("aclnnInplaceIndexCopy of equal rows");
  for (acl::Tensor* const made : {index, self, source}) api().aclDestroyTensor(made);
  if (workspace != nullptr) api().aclrtFree(workspace);
}

}  // namespace
}  // namespace recsdk::test::fake_acl_test
