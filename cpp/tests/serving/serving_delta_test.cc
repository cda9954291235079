// A table that takes deltas answers as a plain map of its newest version, also while it takes them.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/children_of_fork.h"
#include "support/frozen_tables.h"

namespace recsdk::test::serving_delta_test {
namespace {

using Values = std::vector<float>;

/// Every key of a small range, and what each must read; more than are found at a time.
void expect_answers(const ServingTable& table, const Rows& rows, FrozenDType dtype,
                    const std::vector<Key>& keys) {
  const auto dim = static_cast<std::size_t>(table.info().dim);
  Values values(keys.size() * dim);
  Values pooled(keys.size() * dim);
  std::vector<Outcome> outcomes(keys.size());
  table.lookup(keys, values.data(), outcomes);
  table.pool({{keys, {}, {}, Pooling::kSum}, pooled.data(), table.info().dim, {}});
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto found = rows.find(keys[i]);
    const bool is_there = found != rows.end();
    const Values wanted = is_there ? stored_values(dtype, found->second) : Values(dim, kDefault);
    ASSERT_EQ(std::memcmp(&values[i * dim], wanted.data(), dim * 4), 0) << "key " << keys[i];
    for (std::size_t c = 0; c < dim; ++c) ASSERT_EQ(pooled[i * dim + c], 0.0F + wanted[c]);
    ASSERT_EQ(outcomes[i], is_there ? Outcome::kFound : Outcome::kMissing);
  }
  ASSERT_EQ(table.size(), static_cast<std::int64_t>(rows.size()));
}

/// Changes `rows` at random, and returns what changed as a delta of the table.
ServingDelta random_delta(const ServingTable& table, Rows& rows, const std::vector<Key>& keys,
                          std::size_t most, std::mt19937_64& random) {
  ServingDelta delta(table);
  std::normal_distribution<float> normal;
  std::map<Key, bool> chosen;
  for (std::size_t i = random() % (most + 1); i > 0; --i)
    chosen[keys[random() % keys.size()]] = random() % 3 == 0;
  for (const auto& [key, is_erased] : chosen) {
    if (is_erased) {
      delta.erase({&key, 1});
      rows.erase(key);
      continue;
    }
    Values row(static_cast<std::size_t>(table.info().dim));
    for (float& x : row) x = normal(random);
    delta.add({&key, 1}, row.data());
    rows[key] = row;
  }
  return delta;
}

std::vector<Key> some_keys(std::size_t count, std::mt19937_64& random) {
  std::vector<Key> keys{0, -1, INT64_MIN, INT64_MAX};
  while (keys.size() < count) keys.push_back(static_cast<Key>(random() >> (random() % 40)));
  return keys;
}

class DeltaDTypeTest : public testing::TestWithParam<int> {};

TEST_P(DeltaDTypeTest, ChainsOfDeltasAnswerAsAPlainMap) {
  const auto dtype = static_cast<FrozenDType>(GetParam());
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()) + 20);
  for (const std::size_t base_rows : {0U, 1500U}) {
    const std::vector<Key> keys = some_keys(3000, random);
    const TemporaryFolder folder;
    FreezeConfig config = config_of(folder, 5, dtype);
    config.num_shards = base_rows == 0 ? 1 : 3;
    Rows rows;
    for (std::size_t i = 0; i < base_rows; ++i) rows[keys[2 * i]] = Values(5, 1.0F);
    ServingTable table(freeze(rows, config));
    for (int i = 0; i < 40; ++i) {
      SCOPED_TRACE(testing::Message() << "delta " << i);
      const std::size_t most = i % 5 == 0 ? 2000 : 40;
      table.take(random_delta(table, rows, keys, most, random));
      ASSERT_EQ(table.num_deltas(), i + 1);
      if (i % 4 == 3) expect_answers(table, rows, dtype, keys);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeltaDTypeTest, testing::Range(0, kNumFrozenDTypes));

TEST(DeltaTest, SharedRowsChangeWithADeltaThatHasAll) {
  const TemporaryFolder folder;
  FreezeConfig config = config_of(folder, 2, FrozenDType::kFloat32);
  config.num_shared = 3;
  config.num_shards = 2;
  const std::vector<std::string> paths = freeze({{7, {1.0F, 2.0F}}}, config);
  ServingTable table(paths);
  const std::vector<Values> before = shared_rows_of(config);
  const std::vector<Key> keys = {7, 100, 101, 102, 103, 104, 105, 106};
  const auto expect_reads = [&](const std::vector<Values>& shared) {
    Values values(keys.size() * 2);
    std::vector<Outcome> outcomes(keys.size());
    table.lookup(keys, values.data(), outcomes);
    for (std::size_t i = 1; i < keys.size(); ++i) {
      const Values& wanted = shared[static_cast<std::size_t>(shared_row(keys[i], 3))];
      EXPECT_EQ(values[2 * i], wanted[0]) << i;
      EXPECT_EQ(values[2 * i + 1], wanted[1]) << i;
      EXPECT_EQ(outcomes[i], Outcome::kMissing);
    }
    EXPECT_EQ(outcomes[0], Outcome::kFound);
  };
  expect_reads(before);
  ServingDelta delta(table);
  std::vector<Values> after = before;
  for (std::size_t i = 0; i < 3; ++i) {
    if (i > 0) {
      EXPECT_THROW(table.take(delta), std::invalid_argument);  // some, not all
    }
    after[i] = {static_cast<float>(i), -1.0F};
    const Key key = shared_row_key(static_cast<std::int64_t>(i), 3);
    delta.add_shared({&key, 1}, after[i].data());
    EXPECT_THROW(delta.add_shared({&key, 1}, after[i].data()), std::invalid_argument);
  }
  expect_reads(before);
  table.take(delta);
  expect_reads(after);
  EXPECT_EQ(table.size(), 1);
  ServingDelta none(table);
  table.take(none);
  expect_reads(after);
  ServingTable part({&paths[1], 1});
  part.take(delta);
  FreezeConfig plain = config_of(folder, 2, FrozenDType::kFloat32);
  ServingTable other(freeze({}, plain));
  EXPECT_THROW(other.take(delta), std::invalid_argument);
  ServingDelta of_plain(other);
  const Key key = 0;
  EXPECT_THROW(of_plain.add_shared({&key, 1}, after[0].data()), std::invalid_argument);
}

TEST(DeltaTest, KeysThatLeaveAgainTakeNoMemory) {
  std::mt19937_64 random(31);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 4, FrozenDType::kFloat32);
  Rows rows{{7, Values(4, 1.0F)}};
  ServingTable table(freeze(rows, config));
  std::int64_t bytes = 0;
  for (int i = 0; i < 6; ++i) {
    const std::vector<Key> keys = some_keys(5000, random);
    const Values values(keys.size() * 4, 3.0F);
    ServingDelta comes(table);
    comes.add(keys, values.data());
    table.take(comes);
    EXPECT_EQ(table.size(), 5001);
    bytes = table.delta_bytes();
    ServingDelta leaves(table);
    leaves.erase(keys);
    table.take(leaves);
    EXPECT_EQ(table.size(), 1);
  }
  EXPECT_GT(bytes, 5000 * 24);
  ServingDelta small(table);
  small.erase(std::vector<Key>{1, 2, 3});
  table.take(small);
  EXPECT_LT(table.delta_bytes(), 2 * bytes);
  EXPECT_EQ(table.num_deltas(), 13);
}

/// Keys of the first of `num_lines` lines of an index; two have one tag, which no others have.
std::vector<Key> crowd(std::size_t count, std::int64_t num_lines, std::uint64_t seed) {
  std::map<std::uint16_t, Key> by_tag;
  std::vector<Key> pair;
  for (Key key = 0; pair.empty() || by_tag.size() < count; ++key) {
    const std::uint64_t hash = internal::frozen_hash(key, seed);
    if (internal::frozen_line(hash, num_lines) != 0) continue;
    const auto [found, is_new] = by_tag.try_emplace(internal::frozen_tag(hash), key);
    if (!is_new && pair.empty()) pair = {found->second, key};
  }
  std::vector<Key> keys = pair;
  for (const auto& [tag, key] : by_tag) {
    if (keys.size() < count && key != pair[0]) keys.push_back(key);
  }
  return keys;
}

TEST(DeltaTest, KeysThatLeftAreMissingWhateverOthersOfTheirLineLeft) {
  std::mt19937_64 random(36);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 3, FrozenDType::kInt8);
  // A layer has a line for 12 keys: the only one has both of two keys, and the first of six has all
  // of sixty, more than have a tag. In the file, of 150 lines, they lie apart.
  for (const std::size_t count : {2U, 60U}) {
    const std::vector<Key> keys =
        crowd(count, static_cast<std::int64_t>(count) / 12 + 1, config.hash_seed);
    Rows rows = random_rows(3000, 3, random);
    for (const Key key : keys) rows[key] = Values(3, 1.0F);
    ServingTable table(freeze(rows, config));
    for (const Key key : keys) rows.erase(key);
    ServingDelta delta(table);
    delta.erase(keys);
    table.take(delta);
    expect_answers(table, rows, config.dtype, keys);
  }
}

/// Rows of a kilobyte, so that layers have several pieces.
constexpr std::int64_t kWideDim = 256;
constexpr std::int64_t kWideBytes = 8 + 4 * kWideDim;

/// Takes deltas of a twentieth of the keys until the layers were merged a few times.
template <class Take>
void take_wide_deltas(ServingTable& table, Rows& rows, const std::vector<Key>& keys,
                      const Take& take) {
  std::mt19937_64 random(33);
  Values all(keys.size() * kWideDim, 1.0F);
  for (const Key key : keys) rows[key] = Values(kWideDim, 1.0F);
  ServingDelta first(table);
  first.add(keys, all.data());
  Values().swap(all);
  table.take(first);
  first = ServingDelta(table);
  for (int i = 0; i < 30; ++i) {
    take(random_delta(table, rows, keys, keys.size() / 20, random));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(DeltaTest, LayersOfManyPiecesAnswerAsAPlainMap) {
  std::mt19937_64 random(34);
  const TemporaryFolder folder;
  Rows rows{{7, Values(kWideDim, 2.0F)}};
  ServingTable table(freeze(rows, config_of(folder, kWideDim, FrozenDType::kFloat32)));
  const std::vector<Key> keys = some_keys(20'000, random);
  std::set<Key> once(keys.begin(), keys.end());
  const std::vector<Key> distinct(once.begin(), once.end());
  int i = 0;
  take_wide_deltas(table, rows, distinct, [&](const ServingDelta& delta) {
    table.take(delta);
    if (i++ % 5 == 4) expect_answers(table, rows, FrozenDType::kFloat32, distinct);
  });
  ASSERT_GT(table.delta_bytes(), std::int64_t{16} << 20);
}

#if !defined(RECSDK_TEST_EMULATED) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
/// The most memory that the process has held since the last call, in bytes.
std::int64_t take_peak() {
  std::ifstream status("/proc/self/status");
  std::int64_t kilobytes = 0;
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kilobytes;
  }
  std::ofstream("/proc/self/clear_refs") << 5;
  return kilobytes * 1024;
}

TEST(DeltaTest, TakingHoldsTheTableTheDeltaAndACopyOfWhatItTouches) {
  std::mt19937_64 random(35);
  const TemporaryFolder folder;
  Rows rows;
  ServingTable table(freeze(rows, config_of(folder, kWideDim, FrozenDType::kFloat32)));
  const std::vector<Key> keys = some_keys(60'000, random);
  std::set<Key> once(keys.begin(), keys.end());
  int num_merges = 0;
  take_wide_deltas(table, rows, {once.begin(), once.end()}, [&](const ServingDelta& delta) {
    constexpr std::int64_t kPieces = std::int64_t{14} << 20;  // those that are merged at a time
    const std::int64_t touched = delta.num_rows() * kWideBytes + delta.num_erased() * 8;
    const std::int64_t before = table.delta_bytes();
    take_peak();
    const std::int64_t held = take_peak();
    table.take(delta);
    EXPECT_LT(take_peak() - held, touched + kPieces);
    num_merges += table.delta_bytes() < before ? 1 : 0;
  });
  EXPECT_GT(num_merges, 0);
  EXPECT_GT(table.delta_bytes(), std::int64_t{40} << 20);  // what a copy of all would take
}
#endif

TEST(DeltaTest, WhatIsWrongIsRefusedAndChangesNothing) {
  std::mt19937_64 random(32);
  const TemporaryFolder folder;
  const FreezeConfig config = config_of(folder, 2, FrozenDType::kFloat16);
  const Rows rows{{7, Values{1.0F, 2.0F}}};
  ServingTable table(freeze(rows, config));
  const auto delta = [&](std::vector<Key> added, const std::vector<Key>& erased) {
    const Values values(2 * added.size(), 9.0F);
    ServingDelta made(table);
    made.add(added, values.data());
    made.erase(erased);
    return made;
  };
  EXPECT_THROW(table.take(delta({7, 8, 7}, {})), std::invalid_argument);
  EXPECT_THROW(table.take(delta({7}, {8, 7})), std::invalid_argument);
  EXPECT_THROW(table.take(delta({}, {8, 8})), std::invalid_argument);
  FreezeConfig other = config;
  const TemporaryFolder other_folder;
  other.scratch_folder = other_folder.path();
  other.hash_seed = 5;
  ServingTable another(freeze(rows, other));
  EXPECT_THROW(another.take(delta({7}, {})), std::invalid_argument);
  ServingDelta large(table);
  const Key key = 9;
  for (const Values& row : {Values{0.0F, 65520.0F}, Values{-1e9F, 0.0F}})
    EXPECT_THROW(large.add({&key, 1}, row.data()), std::invalid_argument);
  EXPECT_EQ(large.num_rows(), 0);
  const Values fits{-65504.0F, INFINITY};
  large.add({&key, 1}, fits.data());
  expect_answers(table, rows, config.dtype, {7, 8, 9});
  EXPECT_EQ(table.num_deltas(), 0);
  table.take(large);
  expect_answers(table, {{7, rows.at(7)}, {9, fits}}, config.dtype, {7, 8, 9});
}

TEST(DeltaTest, KeysOfShardsThatAreNotOpenAreLeftOut) {
  const TemporaryFolder folder;
  FreezeConfig config = config_of(folder, 1, FrozenDType::kFloat32);
  config.num_shards = 2;
  const std::vector<std::string> paths = freeze({}, config);
  ServingTable part({&paths[1], 1});
  std::vector<Key> keys(100);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<Key>(i);
  const Values values(100, 4.0F);
  ServingDelta delta(part);
  delta.add(keys, values.data());
  part.take(delta);
  std::int64_t here = 0;
  for (const Key key : keys) here += serving_shard(key, 2);
  EXPECT_EQ(part.size(), here);
}

/// Version v has all even keys or all odd ones, by v; every row of it is v.
constexpr std::size_t kLiveKeys = 600;
constexpr int kLiveVersions = 60;

ServingDelta live_delta(const ServingTable& table, int version) {
  ServingDelta delta(table);
  const Values row(static_cast<std::size_t>(table.info().dim), static_cast<float>(version));
  for (std::size_t i = 0; i < kLiveKeys; ++i) {
    const auto key = static_cast<Key>(i);
    if (static_cast<int>(i % 2) == version % 2) {
      delta.add({&key, 1}, row.data());
    } else {
      delta.erase({&key, 1});
    }
  }
  return delta;
}

/// Reads all keys again and again, without memory of the heap in between.
class LiveReader {
 public:
  LiveReader() : values_(4 * kLiveKeys * 3), outcomes_(4 * kLiveKeys) {
    for (std::size_t i = 0; i < 4 * kLiveKeys; ++i) keys_.push_back(key_at(i));
  }

  /// Which version all answers are of; -1 if they are of several.
  int version_of(const ServingTable& table) {
    table.lookup(keys_, values_.data(), outcomes_);
    int version = -1;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (outcomes_[i] == Outcome::kFound) version = static_cast<int>(values_[i * 3]);
    }
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const bool is_there = static_cast<int>(key_at(i) % 2) == version % 2;
      const float wanted = is_there ? static_cast<float>(version) : kDefault;
      for (std::size_t c = 0; c < 3; ++c) {
        if (values_[i * 3 + c] != wanted) return -1;
      }
    }
    return version;
  }

 private:
  static Key key_at(std::size_t i) { return static_cast<Key>(i % kLiveKeys); }

  std::vector<Key> keys_;
  Values values_;
  std::vector<Outcome> outcomes_;
};

TEST(DeltaThreadsTest, EveryAnswerIsOfOneVersion) {
  const TemporaryFolder folder;
  Rows rows;
  for (std::size_t i = 0; i < kLiveKeys; i += 2) rows[static_cast<Key>(i)] = Values(3, 0.0F);
  ServingTable table(freeze(rows, config_of(folder, 3, FrozenDType::kFloat32)));
  std::atomic<bool> is_done{false};
  std::atomic<int> num_wrong{0};
  std::atomic<std::int64_t> num_calls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      LiveReader reader;
      for (int last = 0; !is_done.load();) {
        const int version = reader.version_of(table);
        if (version < last) ++num_wrong;  // -1, or back in time
        last = version;
        ++num_calls;
      }
    });
  }
  for (int version = 1; version <= kLiveVersions; ++version) table.take(live_delta(table, version));
  while (num_calls.load() < 100) std::this_thread::yield();
  is_done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong.load(), 0);
  EXPECT_EQ(LiveReader().version_of(table), kLiveVersions);
}

#if !defined(RECSDK_TEST_EMULATED) && !defined(__SANITIZE_THREAD__)  // no fork beside threads
TEST(DeltaThreadsTest, AForkedProcessTakesDeltasWhateverOthersRead) {
  const TemporaryFolder folder;
  ServingTable table(freeze({}, config_of(folder, 3, FrozenDType::kFloat32)));
  table.take(live_delta(table, 1));
  std::atomic<bool> is_reading{false};
  std::atomic<bool> is_done{false};
  std::thread reader([&] {  // a fork may meet it anywhere, but not in an allocator
    LiveReader live;
    is_reading = true;
    while (!is_done.load()) live.version_of(table);
  });
  while (!is_reading.load()) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(status_of_child([&] {  // it would wait for ever for calls of the thread that it lacks
                table.take(live_delta(table, 2));
                table.take(live_delta(table, 3));
                return LiveReader().version_of(table) == 3;
              }),
              0);
  }
  is_done = true;
  reader.join();
  EXPECT_EQ(LiveReader().version_of(table), 1);
}

TEST(DeltaThreadsTest, AForkedProcessTakesDeltasWhateverOthersTake) {
  const TemporaryFolder folder;
  ServingTable table(freeze({}, config_of(folder, 3, FrozenDType::kFloat32)));
  table.take(live_delta(table, 1));
  const std::vector<Key> many(std::size_t{1} << 22, Key{1});
  std::atomic<bool> is_reading{false};
  std::atomic<bool> is_done{false};
  std::thread reader([&] {  // what it reads cannot be freed, so the other thread waits
    Values out(3);
    const std::vector<std::int64_t> offsets{0, std::ssize(many)};
    is_reading = true;
    while (!is_done.load()) table.pool({{many, offsets, {}}, out.data(), 3, {}});
  });
  while (!is_reading.load()) std::this_thread::yield();
  const ServingDelta delta = live_delta(table, 2);
  std::thread taker([&] { table.take(delta); });
  while (table.num_deltas() < 2) std::this_thread::yield();
  EXPECT_EQ(status_of_child([&] {
              table.take(live_delta(table, 3));
              return LiveReader().version_of(table) == 3;
            }),
            0);
  is_done = true;
  taker.join();
  reader.join();
  EXPECT_EQ(LiveReader().version_of(table), 2);
}
#endif

}  // namespace
}  // namespace recsdk::test::serving_delta_test
