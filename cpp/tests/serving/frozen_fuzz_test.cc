// What the fuzzer of frozen files runs, over seeded bytes.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "fuzz/frozen_operations.h"

namespace recsdk::test::frozen_fuzz_test {
namespace {

TEST(FrozenFuzzTest, DamagedFilesAreRefusedOrServeWithinThemselves) {
  std::mt19937 random(1);
  int num_served = 0;
  constexpr int kFiles = 3000;
  for (int i = 0; i < kFiles; ++i) {
    std::vector<std::uint8_t> input(4 + 5 * (random() % 8));
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    num_served += run_frozen(input.data(), input.size()) ? 1 : 0;
  }
  EXPECT_GT(num_served, kFiles / 10);  // damaged behind a header that fits
  EXPECT_LT(num_served, kFiles * 9 / 10);
}

TEST(FrozenFuzzTest, WholeFilesAreServed) {
  for (std::uint8_t dtype = 0; dtype < kNumFrozenDTypes; ++dtype) {
    for (std::uint8_t dim = 0; dim < 4; ++dim) {
      const std::uint8_t input[] = {dtype, dim, 2, 0};
      EXPECT_TRUE(run_frozen(input, sizeof(input)));
    }
  }
}

}  // namespace
}  // namespace recsdk::test::frozen_fuzz_test
