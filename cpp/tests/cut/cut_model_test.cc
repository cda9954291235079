// Random calls and cuts against a plain model.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "fuzz/cut_operations.h"
#include "profile.h"

namespace recsdk::test::cut_model_test {
namespace {

constexpr std::uint32_t kAllSeeds = 3000;
constexpr std::uint32_t kSampledSeeds = 150;

std::uint32_t num_seeds() { return is_full_profile() ? kAllSeeds : kSampledSeeds; }

TEST(CutModelTest, EveryFileHoldsTheTableAsItWasAtTheCut) {
  for (std::uint32_t seed = 0; seed < num_seeds(); ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(64 + random() % 1500);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    ASSERT_NO_THROW(run_cut_operations(bytes.data(), bytes.size())) << "seed " << seed;
  }
}

}  // namespace
}  // namespace recsdk::test::cut_model_test
