// Where Ascend's libraries are missing, or not whole. A process of its own: once found they stay.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "recsdk/c_api.h"
#include "recsdk/device_table.h"

namespace recsdk::npu_unavailable_test {
namespace {

std::string message_with(const char* library) {
  setenv("RECSDK_ACL_LIBRARY", library, 1);
  try {
    require_backend("npu");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBackendUnavailable);
    return error.what();
  }
  ADD_FAILURE() << "the backend is there";
  return "";
}

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(NpuUnavailable, AMissingLibraryIsNamedWithWhatToInstall) {
  const std::string message = message_with("libno_such_ascendcl.so");
  expect_part(message, "backend 'npu' is not available");
  expect_part(message, "libno_such_ascendcl.so");
  expect_part(message, "install Ascend's driver, the CANN toolkit and its operator package");
  expect_part(message, "set_env.sh");
}

TEST(NpuUnavailable, ALibraryThatIsNotWholeIsNamedByWhatItLacks) {
  expect_part(message_with("libm.so.6"), "none of its libraries has aclInit");
}

TEST(NpuUnavailable, WithoutTheVariableAscendsOwnAreLookedFor) {
  unsetenv("RECSDK_ACL_LIBRARY");
  try {
    require_backend("npu");
    GTEST_SKIP() << "this machine has an NPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBackendUnavailable) << error.what();
  }
}

TEST(NpuUnavailable, ItIsAStatusInC) {
  setenv("RECSDK_ACL_LIBRARY", "libno_such_ascendcl.so", 1);
  EXPECT_EQ(recsdk_require_backend("npu"), RECSDK_ERROR_BACKEND_UNAVAILABLE);
  expect_part(recsdk_last_error_message(), "CANN");
  EXPECT_EQ(recsdk_require_backend("cpu"), RECSDK_OK);
  EXPECT_EQ(recsdk_require_backend("tpu"), RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_require_backend(nullptr), RECSDK_ERROR_INVALID_ARGUMENT);
}

TEST(NpuUnavailable, ATableIsRefusedTheSameWay) {
  setenv("RECSDK_ACL_LIBRARY", "libno_such_ascendcl.so", 1);
  TableConfig config;
  config.dim = 4;
  try {
    const DeviceTable table(config, {.backend = "npu", .device = 0, .max_device_rows = 1});
    FAIL() << "the backend is there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBackendUnavailable);
  }
}

}  // namespace
}  // namespace recsdk::npu_unavailable_test
