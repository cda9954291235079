// Random calls and cuts against a plain model.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "fuzz/cut_operations.h"

namespace recsdk::test {
namespace {

constexpr std::uint32_t kAllSeeds = 3000;
constexpr std::uint32_t kSampledSeeds = 150;

std::uint32_t num_seeds() {
  const char* const profile = std::getenv("RECSDK_TEST_PROFILE");
  return profile != nullptr && std::string(profile) == "full" ? kAllSeeds : kSampledSeeds;
}

TEST(CutModelTest, EveryFileHoldsTheTableAsItWasAtTheCut) {
  for (std::uint32_t seed = 0; seed < num_seeds(); ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(64 + random() % 1500);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    ASSERT_NO_THROW(run_cut_operations(bytes.data(), bytes.size())) << "seed " << seed;
  }
}

}  // namespace
}  // namespace recsdk::test
