// Keys dealt out to shards, against plain loops, on every instruction set.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "kernels/kernels.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::kernels_test {
namespace {

using internal::kernels;
using test::IsaScope;

constexpr std::int64_t kUntouched = -77;

std::vector<Key> random_keys(std::size_t count) {
  std::mt19937_64 random(7);
  std::vector<Key> keys(count);
  for (Key& key : keys) key = static_cast<Key>(random());
  if (count > 2) keys[1] = keys[0] = std::numeric_limits<Key>::min();
  return keys;
}

class Deal : public ::testing::TestWithParam<std::string> {
  IsaScope scope_{GetParam()};
};

TEST_P(Deal, AnOwnerHasARunOfVirtualShards) {
  for (const int bits : {0, 3, 16}) {
    for (const std::uint64_t num_shards : {1U, 2U, 3U, 8U, 1000U, 65'536U}) {
      const std::vector<Key> keys = random_keys(37);
      std::vector<std::uint16_t> owners(keys.size());
      kernels().owners({keys.data(), 37, num_shards, bits, owners.data()});
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const std::uint64_t hash =
            internal::virtual_shard_hash(static_cast<std::uint64_t>(keys[i])) % 65'536;
        const std::uint64_t groups = std::uint64_t{1} << bits;
        EXPECT_EQ(owners[i], hash * groups / 65'536 * num_shards / groups);
      }
    }
  }
}

TEST_P(Deal, TwoShardsGetTheirKeysInOrderAndNothingBeyondIsWritten) {
  for (const std::size_t count : {0U, 1U, 15U, 16U, 17U, 40U, 4096U}) {
    for (const int one_in : {1, 2, 9}) {  // of the keys, the second shard's; 1: all
      const std::vector<Key> keys = random_keys(count);
      std::mt19937 random(static_cast<std::uint32_t>(count));
      std::vector<std::uint16_t> owners(count);
      for (std::uint16_t& owner : owners) owner = random() % static_cast<unsigned>(one_in) == 0;
      std::array<std::vector<Key>, 2> expected;
      std::array<std::vector<std::int32_t>, 2> bags;
      for (std::size_t i = 0; i < count; ++i) {
        expected[owners[i]].push_back(keys[i]);
        bags[owners[i]].push_back(static_cast<std::int32_t>(i) + 1000);
      }
      // The second shard's room is before the first's: places follow from no order of them.
      std::vector<Key> out(count + 2, kUntouched);
      std::vector<std::int32_t> out_bags(count + 2, static_cast<std::int32_t>(kUntouched));
      const std::size_t first = expected[1].size() + 1;
      kernels().deal({keys.data(),
                      owners.data(),
                      static_cast<std::int64_t>(count),
                      1000,
                      {out.data() + first, out.data()},
                      {out_bags.data() + first, out_bags.data()}});
      std::vector<Key> keys_only(count + 2, kUntouched);
      kernels().deal({keys.data(),
                      owners.data(),
                      static_cast<std::int64_t>(count),
                      0,
                      {keys_only.data() + first, keys_only.data()},
                      {nullptr, nullptr}});
      EXPECT_EQ(keys_only, out);
      for (std::vector<Key>& of_shard : expected) of_shard.push_back(kUntouched);
      for (std::vector<std::int32_t>& of_shard : bags)
        of_shard.push_back(static_cast<std::int32_t>(kUntouched));
      expected[1].insert(expected[1].end(), expected[0].begin(), expected[0].end());
      bags[1].insert(bags[1].end(), bags[0].begin(), bags[0].end());
      EXPECT_EQ(out, expected[1]);
      EXPECT_EQ(out_bags, bags[1]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Deal, ::testing::ValuesIn(available_isas()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace recsdk::kernels_test
