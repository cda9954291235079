// pool_keys against map and pool one after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "recsdk/recsdk.h"

namespace recsdk::pool_keys_test {
namespace {

using test::bits_equal;
using test::random_floats;

/// Bags of very different lengths over keys some of which a table does not have.
struct Example {
  explicit Example(std::int64_t num_bags, std::uint32_t seed = 3) {
    std::mt19937_64 random(seed);
    for (std::int64_t b = 0; b < num_bags; ++b) {
      const std::uint64_t length = b == num_bags / 2 ? 9000 : random() % 7;
      for (std::uint64_t i = 0; i < length; ++i)
        keys.push_back(static_cast<Key>(random() % 3000 * 0x9E3779B97F4A7C15U));
      offsets.push_back(static_cast<std::int64_t>(keys.size()));
    }
    weights = random_floats(keys.size(), seed, -1.0F, 2.0F);
  }

  std::vector<Key> keys;
  std::vector<std::int64_t> offsets = {0};
  std::vector<float> weights;
};

Table table_of(std::int64_t dim, DType dtype, int num_threads = 1) {
  TableConfig config;
  config.dim = dim;
  config.weight_dtype = dtype;
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  config.default_row.value = 0.25F;
  config.num_threads = num_threads;
  Table table(config);
  std::vector<Key> known;
  for (std::uint64_t i = 0; i < 3000; i += 1 + i % 3)
    known.push_back(static_cast<Key>(i * 0x9E3779B97F4A7C15U));
  std::vector<RowNumber> rows(known.size());
  std::vector<Outcome> outcomes(known.size());
  table.map(known, rows, outcomes, {true, nullptr});
  return table;
}

struct Pooled {
  std::vector<float> out;
  std::vector<Outcome> outcomes;
};

Pooled mapped_and_pooled(Table& table, const KeyBags& bags, std::int64_t stride) {
  std::vector<RowNumber> rows(bags.keys.size());
  Pooled pooled{std::vector<float>(static_cast<std::size_t>(bags.num_bags() * stride), -7.0F),
                std::vector<Outcome>(bags.keys.size())};
  table.map(bags.keys, rows, pooled.outcomes);
  const PoolBlock block{
      {rows, pooled.outcomes, bags.offsets, bags.weights, bags.pooling}, pooled.out.data(), stride};
  table.pool({&block, 1});
  return pooled;
}

Pooled pooled_at_once(const Table& table, const KeyBags& bags, std::int64_t stride) {
  Pooled pooled{std::vector<float>(static_cast<std::size_t>(bags.num_bags() * stride), -7.0F),
                std::vector<Outcome>(bags.keys.size())};
  table.pool_keys(bags, pooled.out.data(), stride, pooled.outcomes);
  return pooled;
}

void expect_equal(const Pooled& actual, const Pooled& expected) {
  EXPECT_TRUE(bits_equal(actual.out, expected.out));
  EXPECT_EQ(actual.outcomes, expected.outcomes);
}

TEST(PoolKeys, GivesWhatMapAndPoolGive) {
  const Example example(3000);
  for (const std::int64_t dim : {1, 16, 67}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int num_threads : {1, 3}) {
        Table table = table_of(dim, dtype, num_threads);
        for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
          SCOPED_TRACE(::testing::Message() << "dim " << dim << " threads " << num_threads);
          const KeyBags plain{example.keys, example.offsets, {}, pooling};
          const KeyBags weighted{example.keys, example.offsets, example.weights, pooling};
          const KeyBags single{example.keys, {}, example.weights, pooling};
          for (const KeyBags& bags : {plain, weighted, single})
            expect_equal(pooled_at_once(table, bags, dim + 3),
                         mapped_and_pooled(table, bags, dim + 3));
        }
      }
    }
  }
}

TEST(PoolKeys, CountsOutcomesAndMayLeaveThemOut) {
  Table table = table_of(4, DType::kFloat32);
  const Example example(200);
  const KeyBags bags{example.keys, example.offsets, {}, Pooling::kSum};
  const TableStats before = table.stats();
  Pooled expected = pooled_at_once(table, bags, 4);
  std::vector<float> out(expected.out.size());
  table.pool_keys(bags, out.data(), 4);
  EXPECT_TRUE(bits_equal(out, expected.out));
  const TableStats after = table.stats();
  for (const Outcome outcome : {Outcome::kFound, Outcome::kMissing}) {
    const auto o = static_cast<std::size_t>(outcome);
    const auto count = std::count(expected.outcomes.begin(), expected.outcomes.end(), outcome);
    EXPECT_EQ(after.outcomes[o] - before.outcomes[o], 2U * static_cast<std::uint64_t>(count));
    EXPECT_GT(count, 0);
  }
  EXPECT_EQ(after.num_rows, before.num_rows);
}

TEST(PoolKeys, DoesNotSeeBatchesInFlight) {
  Table table = table_of(4, DType::kFloat32);
  Lease lease = table.lease(1);
  const std::vector<Key> keys = {12345, 0};
  std::vector<RowNumber> rows(2);
  std::vector<Outcome> outcomes(2);
  table.map(keys, rows, outcomes, {true, &lease});
  const KeyBags bags{keys, {}, {}, Pooling::kSum};
  const Pooled before = pooled_at_once(table, bags, 4);
  EXPECT_EQ(before.outcomes, (std::vector<Outcome>{Outcome::kMissing, Outcome::kFound}));
  EXPECT_EQ(before.out[0], 0.25F);
  lease.release();
  const Pooled after = pooled_at_once(table, bags, 4);
  EXPECT_EQ(after.outcomes, (std::vector<Outcome>{Outcome::kFound, Outcome::kFound}));
  EXPECT_NE(after.out[0], 0.25F);
}

TEST(PoolKeys, RefusesPartsThatDoNotFit) {
  const Table table = table_of(4, DType::kFloat32);
  const std::vector<Key> keys = {1, 2, 3};
  const std::vector<float> weights(2);
  std::vector<float> out(64);
  std::vector<Outcome> outcomes(3);
  const auto message_of = [&](const KeyBags& bags, std::int64_t stride, std::size_t num_outcomes) {
    try {
      table.pool_keys(bags, out.data(), stride, std::span(outcomes).first(num_outcomes));
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::vector<std::int64_t> short_offsets = {0, 2};
  const std::vector<std::int64_t> descending = {0, 2, 1, 3};
  const auto expect_message = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect_message(
      message_of({keys, short_offsets, {}, Pooling::kSum}, 4, 3),
      "offsets must run from 0 to the number of keys, 3, got 0 to 2; pass B + 1 of them");
  expect_message(message_of({keys, descending, {}, Pooling::kSum}, 4, 3),
                 "offsets must not descend, got 1 after 2 at 2; pass them in ascending order");
  expect_message(message_of({keys, {}, weights, Pooling::kSum}, 4, 3),
                 "weights must have one element per key, 3, got 2");
  expect_message(message_of({keys, {}, {}, Pooling::kSum}, 3, 3),
                 "stride of the output must be from dim, 4, to ");
  expect_message(message_of({keys, {}, {}, Pooling::kSum}, 4, 2),
                 "outcomes must have one element per key, 3, got 2");
  EXPECT_EQ(message_of({{}, {}, {}, Pooling::kSum}, 4, 0), "no error");
}

}  // namespace
}  // namespace recsdk::pool_keys_test
