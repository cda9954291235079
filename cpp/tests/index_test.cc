// The hash index against std::unordered_map.
#include "table/index.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

using Model = std::unordered_map<Key, std::uint32_t>;

void expect_equal(const Index& index, const Model& model, const std::vector<Key>& probes) {
  index.check_invariants();
  ASSERT_EQ(index.size(), static_cast<std::int64_t>(model.size()));
  std::vector<RowNumber> rows(probes.size());
  std::vector<Outcome> outcomes(probes.size());
  index.find(probes, rows.data(), outcomes.data());
  for (std::size_t i = 0; i < probes.size(); ++i) {
    const auto it = model.find(probes[i]);
    ASSERT_EQ(outcomes[i] == Outcome::kFound, it != model.end()) << "key " << probes[i];
    if (it != model.end()) {
      ASSERT_EQ(rows[i], RowNumber{it->second}) << "key " << probes[i];
    }
  }
  std::size_t visited = 0;
  index.for_each([&](Key key, std::uint32_t row) {
    ++visited;
    ASSERT_TRUE(model.contains(key));
    ASSERT_EQ(model.at(key), row);
  });
  ASSERT_EQ(visited, model.size());
}

TEST(Index, EmptyIndexFindsNothing) {
  const Index index(1);
  expect_equal(index, {}, {0, -1, 7});
  EXPECT_FALSE(index.find_one(0).has_value());
}

TEST(Index, EveryBitPatternIsLegal) {
  const std::vector<Key> edges = {0,
                                  -1,
                                  1,
                                  -2,
                                  std::numeric_limits<Key>::min(),
                                  std::numeric_limits<Key>::max(),
                                  std::numeric_limits<Key>::min() + 1};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Index index(seed);
    Model model;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      expect_equal(index, model, edges);
      index.insert(edges[i], static_cast<std::uint32_t>(i));
      model[edges[i]] = static_cast<std::uint32_t>(i);
    }
    expect_equal(index, model, edges);
  }
}

class IndexOperations : public testing::TestWithParam<std::uint64_t> {};

// Insertions and erasures in changing proportion, over key spaces from a few keys to many segments.
TEST_P(IndexOperations, AgreesWithUnorderedMap) {
  std::mt19937_64 random(GetParam());
  Index index(random());
  Model model;
  const std::uint64_t universe = std::uint64_t{1} << (4 + random() % 14);
  const bool is_dense = random() % 2 == 0;
  const auto any_key = [&] {
    const std::uint64_t id = random() % universe;
    return static_cast<Key>(is_dense ? id : mix64(id));
  };
  for (int round = 0; round < 8; ++round) {
    const std::uint64_t erase_percent = random() % 101;
    for (int i = 0; i < 5000; ++i) {
      const Key key = any_key();
      if (random() % 100 < erase_percent) {
        const auto row = index.erase(key);
        const auto it = model.find(key);
        ASSERT_EQ(row.has_value(), it != model.end());
        if (row) {
          ASSERT_EQ(*row, it->second);
          model.erase(it);
        }
      } else if (!model.contains(key)) {
        const auto row = static_cast<std::uint32_t>(random());
        index.insert(key, row);
        model[key] = row;
      }
    }
    std::vector<Key> probes;
    for (int i = 0; i < 3000; ++i) probes.push_back(any_key());
    expect_equal(index, model, probes);
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, IndexOperations,
                         testing::Range(std::uint64_t{0}, std::uint64_t{24}));

TEST(Index, GrowsThroughManySplitsWithinItsMemoryTarget) {
  Index index(5);
  Model model;
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < 400000; ++i) {
    keys.push_back(static_cast<Key>(mix64(i)));
    index.insert(keys.back(), i);
    model[keys.back()] = i;
  }
  expect_equal(index, model, keys);
  const IndexStats stats = index.stats();
  EXPECT_GT(stats.splits, 100U);
  EXPECT_LT(stats.slots * 64 / 5, 21 * index.size());
}

TEST(Index, ClearGivesEverythingBack) {
  Index index(5);
  for (Key key = 0; key < 10000; ++key) index.insert(key, static_cast<std::uint32_t>(key));
  index.clear();
  expect_equal(index, {}, {0, 1, 9999});
  EXPECT_EQ(index.stats().bytes, 0);
  index.insert(3, 4);
  expect_equal(index, {{3, 4}}, {3, 4});
}

TEST(Index, ReserveChangesNoContent) {
  Index index(5);
  index.insert(3, 4);
  index.reserve(100000);
  EXPECT_GE(index.stats().bytes, 100000 * 12);
  expect_equal(index, {{3, 4}}, {3, 4});
}

// Keys whose hashes share their top 16 bits under the seed in use, as from somebody who knows it.
TEST(Index, CollidingKeysStayCorrectAndTheDirectorySmall) {
  constexpr std::uint64_t kSeed = 77;
  const SeededHash hash(kSeed);
  Index index(kSeed);
  Model model;
  std::vector<Key> keys;
  for (Key key = 0; keys.size() < 3000; ++key) {
    if (hash(key) >> 52 == 0x123) keys.push_back(key);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    index.insert(keys[i], static_cast<std::uint32_t>(i));
    model[keys[i]] = static_cast<std::uint32_t>(i);
  }
  expect_equal(index, model, keys);
  Index uniform(kSeed);
  for (std::uint32_t i = 0; i < 3000; ++i) uniform.insert(static_cast<Key>(mix64(i)), i);
  EXPECT_LE(index.stats().directory, 4 * uniform.stats().directory);
}

}  // namespace
}  // namespace recsdk::internal
