// Arrays of calls over the bags of many tables that lie over each other, against a count of uses of
// each byte.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/recsdk.h"
#include "support/arena.h"
#include "support/profile.h"

namespace recsdk::bags_apart_test {
namespace {

using test::Arena;

/// Tables of one row each, whose number is 0, so that memory of zeros is rows, outcomes and
/// weights.
class Tables {
 public:
  explicit Tables(Arena& arena) {
    for (std::int64_t i = arena.below(3); i >= 0; --i) {
      TableConfig config;
      config.dim = 1 + arena.below(3);
      config.name = "number " + std::to_string(i);
      Table& table = tables_.emplace_back(config);
      const Key key = 1;
      RowNumber row = 0;
      Outcome outcome = Outcome::kMissing;
      table.map({&key, 1}, {&row, 1}, {&outcome, 1}, {.insert = true});
    }
  }
  std::deque<Table>& all() { return tables_; }

  std::uint64_t num_updates() const {
    std::uint64_t sum = 0;
    for (const Table& table : tables_) sum += table.update_count();
    return sum;
  }

 private:
  std::deque<Table> tables_;
};

/// Bags of a key each, or bags without keys.
Bags draw_bags(Arena& arena, bool has_weights) {
  const auto n = static_cast<std::size_t>(arena.below(4));
  Bags bags;
  if (n == 0) bags.offsets = arena.read<std::int64_t>(1 + static_cast<std::size_t>(arena.below(3)));
  bags.rows = arena.read<RowNumber>(n);
  bags.outcomes = arena.read<Outcome>(n);
  if (has_weights) bags.weights = arena.read<float>(n);
  return bags;
}

PoolBlock draw_block(Arena& arena, std::int64_t dim, const PoolBlock* /*kind*/) {
  const Bags bags = draw_bags(arena, arena.below(2) == 0);
  const std::int64_t stride = dim + arena.below(9);
  return {bags, arena.vectors_written(dim, stride, bags.num_bags()), stride};
}

GradBlock draw_block(Arena& arena, std::int64_t dim, const GradBlock* /*kind*/) {
  const bool has_weights = arena.below(4) != 0;
  const Bags bags = draw_bags(arena, has_weights);
  const std::int64_t stride = arena.below(3) == 0 ? 0 : dim + arena.below(9);
  const std::int64_t num_vectors = stride == 0 ? bags.num_bags() > 0 : bags.num_bags();
  GradBlock block{bags, arena.vectors_read(dim, stride == 0 ? dim : stride, num_vectors), stride};
  if (has_weights) block.weights_grad = arena.written<float>(bags.rows.size()).data();
  return block;
}

void run(std::span<const PoolCall> calls) { pool_tables(calls); }
void run(std::span<const UpdateCall> calls) { update_tables(calls); }

// Returns whether the call was refused.
template <typename Call, typename Block>
bool call_drawn(std::mt19937_64& random) {
  Arena arena(random, 24 + std::uniform_int_distribution<std::size_t>(0, 150)(random));
  Tables tables(arena);
  std::deque<std::vector<Block>> blocks;
  std::vector<Call> calls;
  for (Table& table : tables.all()) {
    std::vector<Block>& own = blocks.emplace_back();
    for (std::int64_t i = arena.below(3); i > 0; --i)
      own.push_back(draw_block(arena, table.config().dim, own.data()));
    calls.push_back({&table, own});
  }
  const std::vector<std::int64_t> before = arena.words();
  const std::uint64_t updates_before = tables.num_updates();
  std::string message;
  try {
    run(calls);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  EXPECT_EQ(message.empty(), !arena.has_overlap()) << message;
  if (message.empty()) return false;
  EXPECT_NE(message.find("; pass arrays of their own"), std::string::npos) << message;
  EXPECT_EQ(arena.words(), before);
  EXPECT_EQ(tables.num_updates(), updates_before);
  return true;
}

template <typename Call, typename Block>
void expect_refused() {
  std::mt19937_64 random(22);
  const int num_calls = test::is_full_profile() ? 100000 : 3000;
  int num_refused = 0;
  for (int i = 0; i < num_calls && !::testing::Test::HasFailure(); ++i)
    num_refused += call_drawn<Call, Block>(random) ? 1 : 0;
  EXPECT_GT(num_refused, num_calls / 10);
  EXPECT_LT(num_refused, num_calls - num_calls / 10);
}

TEST(BagsApart, VectorsLieOverNothingOfAnyTable) { expect_refused<PoolCall, PoolBlock>(); }
TEST(BagsApart, GradientsOfWeightsLieOverNothingOfAnyTable) {
  expect_refused<UpdateCall, GradBlock>();
}

std::string refusal(std::span<const PoolCall> calls) {
  try {
    pool_tables(calls);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(BagsApart, VectorsMayLieInColumnsOfOneMatrixOrBesideEachOther) {
  std::deque<Table> tables;
  const std::vector<RowNumber> rows(4);
  const std::vector<Outcome> outcomes(4, Outcome::kMissing);
  std::vector<float> matrix(36);
  std::vector<PoolBlock> blocks(2);
  std::vector<PoolCall> calls;
  for (std::size_t i = 0; i < 2; ++i) {
    TableConfig config;
    config.dim = 3;
    config.name = i == 0 ? "first" : "second";
    blocks[i] = {{rows, outcomes}, matrix.data() + 5 * i, 9};
    calls.push_back({&tables.emplace_back(config), {&blocks[i], 1}});
  }
  EXPECT_EQ(refusal(calls), "");
  blocks[1].out = matrix.data() + 8;  // its last column is the first of the next row
  EXPECT_EQ(refusal(calls),
            "table 'first': vectors lie over vectors of table 'second'; pass arrays of their own");
  blocks[1].bags.rows = std::span(rows).first(1);
  blocks[1].bags.outcomes = std::span(outcomes).first(1);
  blocks[1].out = matrix.data() + 33;  // behind the last
  EXPECT_EQ(refusal(calls), "");
  const PoolCall twice{&tables[0], blocks};
  EXPECT_EQ(refusal({&twice, 1}), "");
  blocks[1].out = matrix.data() + 29;
  EXPECT_EQ(refusal({&twice, 1}),
            "table 'first': vectors lie over others of its vectors; pass arrays of their own");
}

}  // namespace
}  // namespace recsdk::bags_apart_test
