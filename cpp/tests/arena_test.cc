// The index's memory: runs never overlap, and freed runs join again.
#include "table/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace recsdk::internal {
namespace {

struct Block {
  std::byte* data;
  std::uint32_t units;
  unsigned char mark;
};

bool is_intact(const Block& block) {
  for (std::size_t i = 0; i < block.units * Arena::kUnit; i += 512) {
    if (block.data[i] != std::byte{block.mark}) return false;
  }
  return true;
}

class ArenaOperations : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ArenaOperations, BlocksKeepTheirContent) {
  std::mt19937_64 random(GetParam());
  Arena arena;
  std::vector<Block> blocks;
  for (int i = 0; i < 4000; ++i) {
    const bool grows = (i / 1000) % 2 == 0;
    if (blocks.empty() || random() % 100 < (grows ? 70U : 35U)) {
      const auto wanted =
          static_cast<std::uint32_t>(random() % 50 == 0 ? 40 + random() % 60 : 1 + random() % 8);
      const auto spare = static_cast<std::uint32_t>(random() % 4);
      std::uint32_t units = wanted;
      std::byte* const data = arena.allocate(units, spare);
      ASSERT_GE(units, wanted);
      ASSERT_LE(units, wanted + spare);
      const Block block{data, units, static_cast<unsigned char>(random())};
      std::memset(block.data, block.mark, block.units * Arena::kUnit);
      blocks.push_back(block);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      ASSERT_TRUE(is_intact(blocks.back()));
      arena.free(blocks.back().data, blocks.back().units);
      blocks.pop_back();
    }
  }
  for (const Block& block : blocks) ASSERT_TRUE(is_intact(block));
  // All freed: the runs have joined, so nothing new is needed for as much in other sizes.
  for (const Block& block : blocks) arena.free(block.data, block.units);
  const std::size_t held = arena.bytes_held();
  std::uint32_t units = 16;
  arena.allocate(units);
  units = 5;
  for (std::size_t taken = 16; taken + 64 < held / Arena::kUnit / 2; taken += 5)
    arena.allocate(units);
  EXPECT_EQ(arena.bytes_held(), held);
  arena.clear();
  EXPECT_EQ(arena.bytes_held(), 0U);
}
INSTANTIATE_TEST_SUITE_P(Seeds, ArenaOperations,
                         testing::Range(std::uint64_t{0}, std::uint64_t{10}));

}  // namespace
}  // namespace recsdk::internal
