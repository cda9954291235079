// Random sequences of calls, against a plain model. The same body can be run by a fuzzer.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "fuzz/table_operations.h"
#include "profile.h"

namespace recsdk::test::table_model_test {
namespace {

constexpr std::uint32_t kAllSeeds = 3000;
constexpr std::uint32_t kSampledSeeds = 150;

std::uint32_t num_seeds() { return is_full_profile() ? kAllSeeds : kSampledSeeds; }

std::vector<std::uint8_t> random_bytes(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(64 + random() % 2048);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

TEST(TableModelTest, EverySequenceOfCallsEndsAsTheModelSays) {
  const std::uint32_t count = num_seeds();
  std::printf("%u of %u seeds\n", count, kAllSeeds);
  for (std::uint32_t seed = 0; seed < count; ++seed) {
    const std::vector<std::uint8_t> bytes = random_bytes(seed);
    EXPECT_NO_THROW(run_operations(bytes.data(), bytes.size())) << "seed " << seed;
  }
}

TEST(TableModelTest, NoBytesAtAll) { EXPECT_NO_THROW(run_operations(nullptr, 0)); }

TEST(TableModelTest, EdgeKeysAreLikeAnyOther) {
  EXPECT_EQ(key_of(0), 0);
  EXPECT_EQ(key_of(1), -1);
  // One column, SGD, no limit; then find_or_insert of the first eight keys, and erasing them.
  std::vector<std::uint8_t> bytes = {0, 0, 11};
  for (const std::uint8_t operation : std::vector<std::uint8_t>{0, 5, 1}) {
    for (std::uint8_t byte : std::vector<std::uint8_t>{operation, 16}) bytes.push_back(byte);
    for (std::uint8_t i = 0; i < 16; ++i) bytes.push_back(i % 8);
  }
  EXPECT_NO_THROW(run_operations(bytes.data(), bytes.size()));
}

}  // namespace
}  // namespace recsdk::test::table_model_test
