// The hash index against std::unordered_map.
#include "keymap/key_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "recsdk/error.h"

namespace recsdk::internal::key_map_test {
namespace {

using Model = std::unordered_map<Key, std::uint32_t>;

void expect_equal(const KeyMap& index, const Model& model, const std::vector<Key>& probes) {
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

TEST(KeyMap, EmptyIndexFindsNothing) {
  const KeyMap index(1);
  expect_equal(index, {}, {0, -1, 7});
  EXPECT_FALSE(index.find_one(0).has_value());
}

TEST(KeyMap, EveryBitPatternIsLegal) {
  const std::vector<Key> edges = {0,
                                  -1,
                                  1,
                                  -2,
                                  std::numeric_limits<Key>::min(),
                                  std::numeric_limits<Key>::max(),
                                  std::numeric_limits<Key>::min() + 1};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    KeyMap index(seed);
    Model model;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      expect_equal(index, model, edges);
      const auto row = static_cast<std::uint32_t>(i);
      ASSERT_EQ(index.find_or_insert(edges[i], row), row);
      model[edges[i]] = row;
    }
    expect_equal(index, model, edges);
  }
}

class IndexOperations : public testing::TestWithParam<std::uint64_t> {};

// Insertions and erasures in changing proportion, over key spaces from a few keys to many segments.
TEST_P(IndexOperations, AgreesWithUnorderedMap) {
  std::mt19937_64 random(GetParam());
  KeyMap index(random());
  Model model;
  const std::uint64_t universe = std::uint64_t{1} << (4 + random() % 14);
  const bool is_dense = random() % 2 == 0;
  const auto any_key = [&] {
    const std::uint64_t id = random() % universe;
    return static_cast<Key>(is_dense ? id : mix64(id));
  };
  std::int64_t num_inserted = 0;
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
      } else {
        const auto row = static_cast<std::uint32_t>(random() % 0xFFFFFFFFU);
        ASSERT_EQ(index.find_or_insert(key, row), model.try_emplace(key, row).first->second);
        ASSERT_EQ(index.size(), std::ssize(model));
        ++num_inserted;
      }
      if (num_inserted >= 100) index.adapt(std::exchange(num_inserted, 0));
    }
    std::vector<Key> probes;
    for (int i = 0; i < 3000; ++i) probes.push_back(any_key());
    expect_equal(index, model, probes);
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, IndexOperations,
                         testing::Range(std::uint64_t{0}, std::uint64_t{24}));

TEST(KeyMap, GrowsThroughManySplitsWithinItsMemoryTarget) {
  KeyMap index(5);
  Model model;
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < 600000; ++i) {
    keys.push_back(static_cast<Key>(mix64(i)));
    index.find_or_insert(keys.back(), i);
    model[keys.back()] = i;
  }
  expect_equal(index, model, keys);
  const KeyMapStats stats = index.stats();
  EXPECT_GT(stats.hashed.splits, 100U);
  EXPECT_LT(stats.hashed.slots * 64 / 5, 20 * index.size());
  EXPECT_LT(stats.bytes, 23 * index.size());
  EXPECT_EQ(stats.hashed.crowded, 0);
}

// Probes with keys in and around the model's.
std::vector<Key> around(const Model& model) {
  std::vector<Key> probes;
  for (const auto& [key, row] : model) {
    probes.push_back(key);
    probes.push_back(static_cast<Key>(static_cast<std::uint64_t>(key) + 1));
    probes.push_back(static_cast<Key>(static_cast<std::uint64_t>(key) - 1));
  }
  return probes;
}

struct DenseCase {
  const char* name;
  std::uint64_t start;
  bool is_shuffled;
  std::uint64_t every;  // of the range's keys, one in so many is there
};

class DenseRanges : public testing::TestWithParam<DenseCase> {};

TEST_P(DenseRanges, MoveToPagesAndStayRight) {
  constexpr std::uint64_t kKeys = 60000;
  const DenseCase param = GetParam();
  std::vector<Key> keys;
  for (std::uint64_t i = 0; i < kKeys; ++i)
    keys.push_back(static_cast<Key>(param.start + i * param.every));
  std::mt19937_64 random(3);
  if (param.is_shuffled) std::shuffle(keys.begin(), keys.end(), random);
  KeyMap index(11);
  Model model;
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    ASSERT_EQ(index.find_or_insert(keys[i], i), i);
    model[keys[i]] = i;
    // Scattered keys lie beside them.
    const auto other = static_cast<Key>(mix64(i + 1));
    if (i % 16 == 0 && !model.contains(other)) {
      ASSERT_EQ(index.find_or_insert(other, i), i);
      model[other] = i;
    }
    if (i % 1000 == 0) index.adapt(1062);
  }
  expect_equal(index, model, around(model));
  EXPECT_EQ(index.stats().dense_keys >= static_cast<std::int64_t>(kKeys) / 2, param.every + 1 <= 2)
      << index.stats().dense_keys;
  for (std::uint32_t i = 0; i < kKeys; i += 1 + i % 3) {
    ASSERT_TRUE(index.erase(keys[i]).has_value());
    ASSERT_FALSE(index.erase(keys[i]).has_value());
    model.erase(keys[i]);
  }
  expect_equal(index, model, around(model));
  for (const Key key : keys) {
    ASSERT_EQ(index.erase(key).has_value(), model.erase(key) == 1);
  }
  EXPECT_EQ(index.stats().dense_pages, 0);
  expect_equal(index, model, keys);
}
INSTANTIATE_TEST_SUITE_P(
    Cases, DenseRanges,
    testing::Values(DenseCase{"counted", 0, false, 1}, DenseCase{"shuffled", 0, true, 1},
                    DenseCase{"offset", std::uint64_t{5} << 40, false, 1},
                    DenseCase{"from_zero_downwards", 0, false, ~std::uint64_t{0}},
                    DenseCase{"around_zero", std::uint64_t{0} - 30000, false, 1},
                    DenseCase{"at_the_end", (std::uint64_t{1} << 63) - 30000, true, 1},
                    DenseCase{"thin", 1 << 20, false, 7},
                    DenseCase{"thin_shuffled", 1 << 20, true, 40}),
    [](const auto& ranges) { return std::string(ranges.param.name); });

TEST(KeyMap, CountedIdsTakeLittleMemory) {
  KeyMap index(5);
  constexpr std::int64_t kKeys = 1 << 20;
  for (std::int64_t i = 0; i < kKeys; ++i) {
    index.find_or_insert(i, static_cast<std::uint32_t>(i));
    if (i % 8192 == 0) index.adapt(8192);
  }
  const KeyMapStats stats = index.stats();
  EXPECT_EQ(stats.dense_keys, kKeys);
  EXPECT_LT(stats.bytes, 8 * kKeys);
}

TEST(KeyMap, ClearGivesEverythingBack) {
  KeyMap index(5);
  for (Key key = 0; key < 10000; ++key) index.find_or_insert(key, static_cast<std::uint32_t>(key));
  index.clear();
  expect_equal(index, {}, {0, 1, 9999});
  EXPECT_EQ(index.stats().bytes, 0);
  index.find_or_insert(3, 4);
  expect_equal(index, {{3, 4}}, {3, 4});
}

// Blocks of keys, whole and not, with all, some or none of the keys there.
TEST(KeyMap, BatchesOfEveryLengthAreFoundAsOneByOne) {
  std::mt19937_64 random(8);
  KeyMap index(5);
  constexpr std::uint64_t kKeys = 20000;
  for (std::uint32_t i = 0; i < kKeys; ++i) index.find_or_insert(static_cast<Key>(mix64(i)), i);
  for (std::size_t length = 0; length < 130; ++length) {
    for (const std::uint64_t known_percent : {0U, 50U, 95U, 100U}) {
      std::vector<Key> keys(length);
      for (Key& key : keys) {
        const bool is_known = random() % 100 < known_percent;
        key = static_cast<Key>(mix64(random() % kKeys + (is_known ? 0 : kKeys)));
      }
      std::vector<RowNumber> rows(length + 1, -7);
      std::vector<Outcome> outcomes(length + 1, Outcome::kRefused);
      index.find(keys, rows.data(), outcomes.data());
      for (std::size_t i = 0; i < length; ++i) {
        const auto row = index.find_one(keys[i]);
        ASSERT_EQ(outcomes[i], row ? Outcome::kFound : Outcome::kMissing) << i << " of " << length;
        ASSERT_EQ(rows[i], RowNumber{row.value_or(0)}) << i << " of " << length;
      }
      ASSERT_EQ(rows[length], -7);
      ASSERT_EQ(outcomes[length], Outcome::kRefused);
    }
  }
}

TEST(KeyMap, ReserveTakesTheShapeAtOnce) {
  constexpr std::uint32_t kKeys = 400'000;
  KeyMap index(5);
  index.reserve(kKeys);
  const std::int64_t reserved = index.stats().bytes;
  EXPECT_LT(reserved, std::int64_t{22} * kKeys);
  Model model;
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    keys.push_back(static_cast<Key>(mix64(i)));
    index.find_or_insert(keys.back(), i);
    model[keys.back()] = i;
  }
  EXPECT_EQ(index.stats().hashed.splits, 0U);
  EXPECT_EQ(index.stats().bytes, reserved);
  expect_equal(index, model, keys);
}

TEST(KeyMap, ReserveChangesNoContent) {
  KeyMap index(5);
  index.find_or_insert(3, 4);
  index.reserve(100000);
  EXPECT_GE(index.stats().bytes, 100000 * 12);
  expect_equal(index, {{3, 4}}, {3, 4});
}

TEST(KeyMap, GrowingAtOnceChangesNoContent) {
  for (const bool is_dense : {false, true}) {
    KeyMap index(5);
    Model model;
    std::vector<Key> keys;
    const auto insert = [&](std::uint32_t until) {
      for (auto i = static_cast<std::uint32_t>(keys.size()); i < until; ++i) {
        keys.push_back(is_dense ? Key{i} : static_cast<Key>(mix64(i)));
        EXPECT_EQ(index.find_or_insert(keys[i], i), i);
        model[keys[i]] = i;
      }
      index.adapt(until);
    };
    insert(3000);
    index.grow_for(40'000);
    expect_equal(index, model, keys);
    const std::uint64_t splits = index.stats().hashed.splits;
    insert(40'000);
    expect_equal(index, model, keys);
    if (!is_dense) {
      EXPECT_EQ(index.stats().hashed.splits, splits);
    }
    index.grow_for(10);
    insert(90'000);  // more than was said
    expect_equal(index, model, keys);
    for (std::size_t i = 0; i < keys.size(); i += 2) {
      index.erase(keys[i]);
      model.erase(keys[i]);
    }
    index.grow_for(2'000'000);
    expect_equal(index, model, keys);
  }
}

// Keys whose hashes share their top 10 bits under the seed in use, as from somebody who knows it.
TEST(KeyMap, CollidingKeysStayCorrectAndTheDirectorySmall) {
  constexpr std::uint64_t kSeed = 77;
  const SeededHash hash(kSeed);
  KeyMap index(kSeed);
  Model model;
  std::vector<Key> keys;
  for (Key key = 0; keys.size() < 9000; ++key) {
    if (hash(key) >> 54 == 0x123) keys.push_back(key);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    index.find_or_insert(keys[i], static_cast<std::uint32_t>(i));
    model[keys[i]] = static_cast<std::uint32_t>(i);
  }
  expect_equal(index, model, keys);
  KeyMap uniform(kSeed);
  for (std::uint32_t i = 0; i < 9000; ++i) uniform.find_or_insert(static_cast<Key>(mix64(i)), i);
  EXPECT_LE(index.stats().hashed.directory, 4 * uniform.stats().hashed.directory);
  EXPECT_GT(index.stats().hashed.crowded, 0);
  index.grow_for(1'000'000);
  expect_equal(index, model, keys);
}

// Keys of one Bloom bit and two homes, the first bucket and the one in the middle, however many
// there are. Those that come and go mark every bucket of the first segment as passed, so that a key
// that is not there is looked for all the way around.
TEST(KeyMap, ProbesThatGoAroundASegmentEnd) {
  constexpr std::uint64_t kSeed = 5;
  const SeededHash hash(kSeed);
  std::vector<Key> first;
  std::vector<Key> middle;
  for (Key key = 0; first.size() < 300 || middle.size() < 300; ++key) {
    const HashParts parts{hash(key)};
    if (parts.bloom_bit() != 1U << 8) continue;
    if (parts.bucket_in(256) == 0) first.push_back(key);
    if (parts.bucket_in(256) == 128) middle.push_back(key);
  }
  KeyMap index(kSeed);
  Model model;
  std::vector<Key> probes = first;
  probes.insert(probes.end(), middle.begin(), middle.end());
  const auto insert = [&](const std::vector<Key>& keys, std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      const auto row = static_cast<std::uint32_t>(model.size() * 7 + i);
      index.find_or_insert(keys[i], row);
      model[keys[i]] = row;
    }
    expect_equal(index, model, probes);
  };
  const auto erase = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      index.erase(first[i]);
      model.erase(first[i]);
    }
    expect_equal(index, model, probes);
  };
  insert(first, 0, 170);  // of 310 slots; the segment would grow at 179
  const std::int64_t bytes = index.stats().bytes;
  erase(0, 90);
  insert(middle, 0, 95);
  erase(90, 165);  // with fewer keys it would be made anew
  insert(middle, 95, 170);
  EXPECT_EQ(index.stats().bytes, bytes);
  insert(first, 170, 300);
  insert(middle, 170, 300);
  expect_equal(index, model, probes);
}

}  // namespace
}  // namespace recsdk::internal::key_map_test
