// What keys without a row read and train, against rows of a table that has room for all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "recsdk/recsdk.h"
#include "saving_tables.h"

namespace recsdk::test::default_rows_test {
namespace {

constexpr std::int64_t kDim = 5;

TableConfig config_of(DefaultConfig reads, DType dtype = DType::kFloat32) {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = OptimizerConfig::adagrad();
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  config.weight_dtype = dtype;
  config.default_row = reads;
  config.max_rows = 20;
  return config;
}

std::vector<Key> some_keys(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Key> keys(count);
  for (Key& key : keys) key = static_cast<Key>(random() % 60 * 0x9E3779B97F4A7C15U);
  return keys;
}

std::vector<float> looked_up(const Table& table, std::span<const Key> keys) {
  std::vector<float> values(keys.size() * static_cast<std::size_t>(kDim));
  table.lookup(keys, values.data());
  return values;
}

/// Every third of these keys' vectors is pooled with the two before it, by `pool` and `pool_keys`.
void expect_pooled(Table& table, std::span<const Key> keys, const std::vector<float>& rows) {
  std::vector<std::int64_t> offsets = {0};
  while (offsets.back() + 3 <= static_cast<std::int64_t>(keys.size()))
    offsets.push_back(offsets.back() + 3);
  keys = keys.first(static_cast<std::size_t>(offsets.back()));
  std::vector<float> wanted((offsets.size() - 1) * static_cast<std::size_t>(kDim));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::size_t at = i / kDim * 3 * kDim + i % kDim;
    wanted[i] = ((0.0F + rows[at]) + rows[at + kDim]) + rows[at + 2 * kDim];
  }
  std::vector<float> out(wanted.size());
  table.pool_keys({keys, offsets, {}, Pooling::kSum}, out.data(), kDim);
  EXPECT_TRUE(bits_equal(out, wanted));
  std::vector<RowNumber> numbers(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  table.map(keys, numbers, outcomes);
  const PoolBlock block{{numbers, outcomes, offsets, {}, Pooling::kSum}, out.data(), kDim};
  table.pool({&block, 1});
  EXPECT_TRUE(bits_equal(out, wanted));
}

TEST(DefaultRows, ASharedRowLearnsAsTheRowOfItsKeyWould) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t num_rows : {1, 5, 8}) {
      Table table(config_of({DefaultKind::kSharedRows, 0.0F, num_rows}, dtype));
      // Gets the row of every key without one under the key that stands for it, and room for all.
      TableConfig plain = config_of({}, dtype);
      plain.max_rows.reset();
      Table other(plain);
      std::set<Key> known;
      for (std::uint64_t step = 0; step < 6; ++step) {
        const std::vector<Key> keys = some_keys(90, step);
        std::vector<RowNumber> numbers(keys.size());
        std::vector<Outcome> outcomes(keys.size());
        table.map(keys, numbers, outcomes, {.insert = true});
        std::vector<Key> standing = keys;
        for (std::size_t i = 0; i < keys.size(); ++i) {
          if (has_row(outcomes[i])) continue;
          EXPECT_EQ(outcomes[i], Outcome::kRefused);
          EXPECT_EQ(numbers[i], shared_row(keys[i], num_rows));
          standing[i] = shared_row_key(numbers[i], num_rows);
        }
        const std::vector<float> gradients = random_floats(keys.size() * kDim, 7, -1.0F, 1.0F);
        std::vector<float> wanted(keys.size() * kDim);
        other.find_or_insert(standing, wanted.data());
        EXPECT_TRUE(bits_equal(looked_up(table, keys), wanted));
        expect_pooled(table, keys, wanted);
        table.apply_gradients(keys, gradients.data());
        other.apply_gradients(standing, gradients.data());
      }
      EXPECT_EQ(table.size(), 20);
      EXPECT_EQ(table.stats().num_rows, 20);
      const SharedRows rows = table.shared_rows();
      ASSERT_EQ(static_cast<std::int64_t>(rows.keys.size()), num_rows);
      std::vector<float> of_other(rows.weights.size());
      other.find_or_insert(rows.keys, of_other.data());
      EXPECT_TRUE(bits_equal(rows.weights, of_other));
    }
  }
}

TEST(DefaultRows, AnInitialRowIsThatOfTheKeyAndIsNotKept) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Table table(config_of({DefaultKind::kInitialRow}, dtype));
    Table fresh(config_of({}, dtype));
    const std::vector<Key> keys = some_keys(90, 1);
    std::vector<float> values(keys.size() * kDim);
    table.find_or_insert(keys, values.data());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::vector<float> initial(kDim);
      fresh.find_or_insert({&keys[i], 1}, initial.data());
      fresh.erase({&keys[i], 1});
      const std::vector<float> found(values.begin() + static_cast<std::ptrdiff_t>(i * kDim),
                                     values.begin() + static_cast<std::ptrdiff_t>((i + 1) * kDim));
      EXPECT_TRUE(bits_equal(found, initial));
    }
    expect_pooled(table, keys, values);
    const std::vector<float> gradients(keys.size() * kDim, 1.0F);
    std::vector<Outcome> outcomes(keys.size());
    table.apply_gradients(keys, gradients.data(), outcomes);
    const std::vector<float> after = looked_up(table, keys);
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_EQ(after[i] == values[i], !has_row(outcomes[i / kDim]));
    EXPECT_EQ(table.size(), 20);
  }
}

TEST(DefaultRows, ACustomInitializerMakesWhatIsRead) {
  TableConfig config = config_of({DefaultKind::kInitialRow}, DType::kBFloat16);
  Table* asked = nullptr;
  config.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
    std::vector<float> none(keys.size() * kDim);
    if (asked != nullptr) {
      EXPECT_THROW(asked->lookup(keys, none.data()), Error);
    }
    for (std::size_t i = 0; i < none.size(); ++i)
      values[i] = static_cast<float>(keys[i / kDim] % 16) + static_cast<float>(i % kDim);
  });
  Table table(config);
  const std::vector<Key> keys = some_keys(90, 3);
  std::vector<float> values(keys.size() * kDim);
  table.find_or_insert(keys, values.data());
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(values[i], static_cast<float>(keys[i / kDim] % 16) + static_cast<float>(i % kDim));
  asked = &table;
  EXPECT_TRUE(bits_equal(looked_up(table, keys), values));
  expect_pooled(table, keys, values);
}

TEST(DefaultRows, TheKeyOfASharedRowReadsIt) {
  for (const std::int64_t num_rows : {1, 2, 3, 7, 64, 1'000, 1'024, 65'535, 65'536}) {
    std::set<Key> keys;
    for (std::int64_t row = 0; row < num_rows; row += std::max<std::int64_t>(num_rows / 64, 1)) {
      const Key key = shared_row_key(row, num_rows);
      EXPECT_EQ(shared_row(key, num_rows), row);
      EXPECT_EQ(virtual_shard(key), (row * kNumVirtualShards + num_rows - 1) / num_rows);
      EXPECT_TRUE(keys.insert(key).second);
    }
  }
}

TEST(DefaultRows, ARestoreThatGetsNoSharedRowsMakesThemAnew) {
  const DefaultConfig reads{DefaultKind::kSharedRows, 0.0F, 2};
  Table table(config_of(reads));
  const SharedRows first = table.shared_rows();
  const std::vector<Key> keys = some_keys(9, 2);
  const std::vector<float> gradients(keys.size() * kDim, 1.0F);
  table.apply_gradients(keys, gradients.data());  // none has a row
  EXPECT_FALSE(bits_equal(table.shared_rows().weights, first.weights));
  Restore restore(table);
  restore.commit(0);
  EXPECT_TRUE(bits_equal(table.shared_rows().weights, first.weights));
  EXPECT_TRUE(bits_equal(table.shared_rows().state, first.state));
}

TableConfig begun_config() {
  TableConfig config = config_of({DefaultKind::kSharedRows, 0.0F, 4, BeginWith::kSharedRow});
  config.admission = AdmitConfig{{{AdmitTerm::Kind::kCount, 3}}, std::nullopt};
  config.eviction = EvictConfig{};
  config.eviction_groups = 1;
  return config;
}

/// Steps of 30 keys, of which those of `ahead` more are mapped before one is pooled and trained;
/// every fifth is abandoned. What was pooled, and all rows at the end.
std::vector<float> trained_ahead(std::size_t ahead) {
  constexpr std::size_t kKeys = 30;
  constexpr std::uint64_t kSteps = 20;
  struct Batch {
    Lease lease;
    std::vector<RowNumber> rows = std::vector<RowNumber>(kKeys);
    std::vector<Outcome> outcomes = std::vector<Outcome>(kKeys);
  };
  Table table(begun_config());
  std::vector<float> found;
  std::deque<Batch> batches;
  std::uint64_t step = 0;
  for (std::uint64_t next = 0; next < kSteps; ++next) {
    for (; step < kSteps && step <= next + ahead; ++step) {
      Batch& batch = batches.emplace_back();
      batch.lease = table.lease(static_cast<std::int64_t>(step));
      table.map(some_keys(kKeys, step), batch.rows, batch.outcomes, {true, &batch.lease});
    }
    const Bags bags{batches.front().rows, batches.front().outcomes, {}, {}, Pooling::kSum};
    if (next % 5 != 4) {
      std::vector<float> out(kKeys * kDim);
      const PoolBlock pooled{bags, out.data(), kDim};
      table.pool({&pooled, 1});
      found.insert(found.end(), out.begin(), out.end());
      const std::vector<float> gradients =
          random_floats(kKeys * kDim, static_cast<std::uint32_t>(next));
      const GradBlock trained{bags, gradients.data(), kDim, nullptr};
      table.update({&trained, 1});
    }
    batches.pop_front();
  }
  const std::vector<float> rows = looked_up(table, some_keys(200, 99));
  found.insert(found.end(), rows.begin(), rows.end());
  return found;
}

TEST(DefaultRows, RowsBeginWithSharedOnesHoweverFarAheadBatchesAreMapped) {
  const std::vector<float> wanted = trained_ahead(0);
  for (const std::size_t ahead : {1U, 3U, 12U})
    EXPECT_TRUE(bits_equal(trained_ahead(ahead), wanted));
}

TEST(DefaultRows, KeysWithoutAStepBeginAtOnce) {
  Table table(config_of({DefaultKind::kSharedRows, 0.0F, 1, BeginWith::kSharedRow}));
  const std::vector<Key> keys = some_keys(40, 1);
  const std::vector<float> gradients(keys.size() * kDim, 1.0F);
  const std::vector<float> first = looked_up(table, keys);
  table.apply_gradients(keys, gradients.data());  // of the shared row
  std::vector<float> read(keys.size() * kDim);
  table.find_or_insert(keys, read.data());
  EXPECT_TRUE(bits_equal(read, looked_up(table, keys)));
  const SharedRows shared = table.shared_rows();
  for (std::size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], shared.weights[i % kDim]);
  EXPECT_FALSE(bits_equal(read, first));
}

TEST(DefaultRows, AFailedReadOfInitialRowsChangesNothing) {
  bool fails = false;
  TableConfig config = config_of({DefaultKind::kInitialRow});
  config.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
    if (fails) throw std::runtime_error("no rows");
    std::fill_n(values, keys.size() * kDim, 1.0F);
  });
  config.admission = AdmitConfig{{{AdmitTerm::Kind::kCount, 3}}, std::nullopt};
  Table table(config);
  const std::vector<Key> keys = {5, 6, -7};
  std::vector<float> read(keys.size() * kDim);
  table.find_or_insert(keys, read.data());
  const TableStats stats = table.stats();
  fails = true;
  EXPECT_THROW(table.find_or_insert(keys, read.data()), std::runtime_error);
  EXPECT_TRUE(std::ranges::equal(table.stats().outcomes, stats.outcomes));
  fails = false;
  std::vector<Outcome> outcomes(keys.size());
  table.find_or_insert(keys, read.data(), outcomes);  // the second time that is counted
  EXPECT_EQ(outcomes.front(), Outcome::kNotAdmitted);
  table.find_or_insert(keys, read.data(), outcomes);
  EXPECT_EQ(outcomes.front(), Outcome::kInserted);
}

// What eviction keeps of keys is an array by row number, and a key without a row has none.
TEST(DefaultRows, InitialRowsAreReadBesideKeysThatEvictionSees) {
  TableConfig config = config_of({DefaultKind::kInitialRow});
  config.max_rows = 4;
  config.eviction_groups = 1;
  config.eviction = EvictConfig{};
  Table table(config);
  const std::vector<Key> keys = some_keys(200, 7);
  std::vector<float> read(keys.size() * kDim);
  std::vector<Outcome> outcomes(keys.size());
  table.find_or_insert(keys, read.data(), outcomes);
  EXPECT_EQ(std::count(outcomes.begin(), outcomes.end(), Outcome::kInserted), 4);
  std::vector<float> wanted(read.size());
  initial_weights(config.initializer, config.seed, table_hash(config.name), kDim, keys,
                  wanted.data());
  EXPECT_TRUE(bits_equal(read, wanted));
}

TEST(DefaultRows, WhatDoesNotFitIsRefused) {
  EXPECT_THROW(Table(config_of({DefaultKind::kConstant, 0.0F, 1, BeginWith::kSharedRow})),
               std::invalid_argument);
  EXPECT_THROW(Table(config_of({DefaultKind::kSharedRows, 0.0F, 1, static_cast<BeginWith>(2)})),
               std::invalid_argument);
  for (const std::int64_t num_rows : {-1, 0, 65'537})
    EXPECT_THROW(Table(config_of({DefaultKind::kSharedRows, 0.0F, num_rows})),
                 std::invalid_argument);
  Table table(config_of({DefaultKind::kSharedRows, 0.0F, 2}));
  const std::vector<float> weights(kDim);
  const Key key = shared_row_key(1, 4);
  Restore restore(table);
  EXPECT_THROW(restore.add_shared({&key, 1}, weights.data(), nullptr), std::invalid_argument);
  const RowNumber number = 2;
  const Outcome outcome = Outcome::kMissing;
  std::vector<float> out(kDim);
  const PoolBlock block{{{&number, 1}, {&outcome, 1}, {}, {}, Pooling::kSum}, out.data(), kDim};
  EXPECT_THROW(table.pool({&block, 1}), std::invalid_argument);
}

}  // namespace
}  // namespace recsdk::test::default_rows_test
