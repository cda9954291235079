// The index's memory: runs never overlap, and freed runs join again.
#include "keymap/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace recsdk::internal::arena_test {
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
      const auto less = static_cast<std::uint32_t>(random() % wanted % 3);
      std::uint32_t units = wanted;
      std::byte* const data = arena.allocate(units, less);
      ASSERT_GE(units, wanted - less);
      ASSERT_LE(units, wanted);
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

TEST(Arena, TakesAFreeRunThatIsJustLongEnough) {
  Arena arena;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 20; ++i) {
    std::uint32_t units = 7;
    blocks.push_back(arena.allocate(units));
  }
  arena.free(blocks[5], 7);
  for (const std::uint32_t wanted : {7U, 8U, 9U}) {
    std::uint32_t units = wanted;
    EXPECT_EQ(arena.allocate(units, 2), blocks[5]);
    EXPECT_EQ(units, 7U);
    arena.free(blocks[5], 7);
  }
  std::uint32_t units = 10;
  EXPECT_NE(arena.allocate(units, 2), blocks[5]);
  EXPECT_EQ(units, 10U);
}

// Every third block is freed: the ones between can be moved so that two free runs become one.
TEST(Arena, MovesABlockOutOfTheWay) {
  Arena arena;
  std::vector<Block> blocks;
  for (unsigned char i = 0; i < 30; ++i) {
    Block block{nullptr, 4, i};
    block.data = arena.allocate(block.units);
    std::memset(block.data, i, block.units * Arena::kUnit);
    blocks.push_back(block);
  }
  const auto units_of = [](const std::byte*) { return 4U; };
  EXPECT_EQ(arena.find_between_runs(8, units_of), nullptr);
  for (std::size_t i = 2; i < 20; i += 2) arena.free(blocks[i].data, 4);
  EXPECT_EQ(arena.find_between_runs(9, units_of), nullptr);
  EXPECT_FALSE(arena.has_runs(8, 1));
  EXPECT_TRUE(arena.has_runs(2, 18));
  const std::size_t held = arena.bytes_held();
  const std::size_t free = arena.bytes_free();
  std::byte* const between = arena.find_between_runs(8, units_of);
  ASSERT_NE(between, nullptr);
  for (Block& block : blocks) {
    if (block.data == between) block.data = arena.move_down(between, 4);
  }
  EXPECT_EQ(arena.bytes_free(), free);
  EXPECT_TRUE(arena.has_runs(8, 1));
  EXPECT_FALSE(arena.has_runs(8, 2));
  Block joined{nullptr, 8, 77};
  joined.data = arena.allocate(joined.units);
  std::memset(joined.data, joined.mark, joined.units * Arena::kUnit);
  EXPECT_EQ(arena.bytes_held(), held);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i < 2 || i >= 20 || i % 2 == 1) {
      EXPECT_TRUE(is_intact(blocks[i])) << i;
    }
  }
}

TEST(Arena, HasOnePageBackedAheadOnceItIsLarge) {
  constexpr std::uint32_t kHugeUnits = kHugePage / Arena::kUnit;
  Arena arena;
  std::uint32_t units = 1;
  arena.allocate(units);
  EXPECT_FALSE(arena.populate_ahead());
  for (int chunk = 0; chunk < 2; ++chunk) {
    units = 32 * kHugeUnits;
    arena.allocate(units);
  }
  EXPECT_FALSE(arena.populate_ahead());  // the chunk is full
  units = kHugeUnits + kHugeUnits / 4;
  arena.allocate(units);
  EXPECT_FALSE(arena.populate_ahead());  // a quarter of the last page is used
  units = kHugeUnits + kHugeUnits / 4;
  arena.allocate(units);
  const std::size_t held = arena.bytes_held();
  EXPECT_TRUE(arena.populate_ahead());
  EXPECT_EQ(arena.bytes_held(), held + kHugePage);
  EXPECT_FALSE(arena.populate_ahead());
  units = kHugeUnits / 2;
  arena.allocate(units);
  EXPECT_EQ(arena.bytes_held(), held + kHugePage);
}

}  // namespace
}  // namespace recsdk::internal::arena_test
