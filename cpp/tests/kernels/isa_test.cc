// The choice of the instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "kernels/kernels.h"
#include "recsdk/runtime.h"

namespace recsdk::isa_test {
namespace {

TEST(Isa, TheBaselineComesFirstAndTheChoiceIsAvailable) {
  const std::vector<std::string> names = available_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), "baseline");
  EXPECT_NE(std::find(names.begin(), names.end(), isa()), names.end());
}

TEST(Isa, CanBeSwitched) {
  const std::string before = isa();
  for (const std::string& name : available_isas()) {
    const test::IsaScope scope(name);
    EXPECT_EQ(isa(), name);
    EXPECT_EQ(internal::kernels().isa, name);
  }
  EXPECT_EQ(isa(), before);
}

TEST(Isa, AnUnknownNameIsRefusedAndNothingChanges) {
  const std::string before = isa();
  try {
    set_isa("avx1024");
    FAIL() << "no exception";
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'avx1024'"), std::string::npos) << message;
    EXPECT_NE(message.find("choose one of baseline"), std::string::npos) << message;
  }
  EXPECT_EQ(isa(), before);
}

/// Each runs in a process of its own, where nothing has been chosen before.
class IsaFromEnvironment : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

void exit_with_choice(const char* wish, const std::string& expected) {
  setenv("RECSDK_ISA", wish, 1);
  std::exit(isa() == expected ? 0 : 1);
}

TEST_F(IsaFromEnvironment, NamesTheChoice) {
  for (const std::string& name : available_isas()) {
    EXPECT_EXIT(exit_with_choice(name.c_str(), name), ::testing::ExitedWithCode(0), "");
  }
}

TEST_F(IsaFromEnvironment, EmptyMeansTheFastest) {
  EXPECT_EXIT(exit_with_choice("", available_isas().back()), ::testing::ExitedWithCode(0), "");
}

void exit_with_refusal() {
  setenv("RECSDK_ISA", "mmx", 1);
  try {
    internal::kernels();
  } catch (const std::invalid_argument& error) {
    std::exit(std::string(error.what()).find("RECSDK_ISA: no instruction set 'mmx'") == 0 ? 0 : 1);
  }
  std::exit(2);
}

TEST_F(IsaFromEnvironment, AnUnknownNameIsRefused) {
  EXPECT_EXIT(exit_with_refusal(), ::testing::ExitedWithCode(0), "");
}

TEST(Version, IsThreeNumbers) {
  const std::string text = version();
  EXPECT_EQ(text.find_first_not_of("0123456789."), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '.'), 2) << text;
}

}  // namespace
}  // namespace recsdk::isa_test
