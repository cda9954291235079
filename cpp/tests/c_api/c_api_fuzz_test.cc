// What the fuzzer of the C interface runs, over seeded bytes.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "fuzz/c_api_operations.h"
#include "profile.h"

namespace recsdk::test::c_api_fuzz_test {
namespace {

TEST(CApiFuzzTest, AnyArgumentsAreRefusedOrDoneAsAMapDoesThem) {
  const std::uint32_t num_seeds = is_full_profile() ? 3000 : 200;
  for (std::uint32_t seed = 0; seed < num_seeds; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(64 + random() % 3000);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    EXPECT_NO_THROW(run_c_api(bytes.data(), bytes.size())) << "seed " << seed;
  }
}

}  // namespace
}  // namespace recsdk::test::c_api_fuzz_test
