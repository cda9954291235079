// Arrays of a call over many indexes that lie over each other, against a count of uses a byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/recsdk.h"
#include "support/arena.h"
#include "support/profile.h"
#include "util/apart.h"

namespace recsdk::apart_test {
namespace {

/// A call with arrays anywhere in the memory.
struct DrawnCall {
  DrawnCall(Index& index, test::Arena& arena) {
    const auto n = static_cast<std::size_t>(arena.below(4));
    call.index = &index;
    call.outcomes = arena.written<Outcome>(n);
    call.options.insert = true;
    if (arena.below(2) == 0) call.options.data.times = arena.read<std::int64_t>(n);
    if (arena.below(2) == 0) call.options.data.counts = arena.read<std::int64_t>(n);
    if (arena.below(2) == 0) {
      call.keys = arena.read<Key>(n);
    } else {
      const auto first = static_cast<std::size_t>(arena.below(n + 1));
      pieces = {arena.read<Key>(first), arena.read<Key>(n - first)};
      call.pieces = pieces;
    }
    if (arena.below(3) != 0) {
      call.rows = arena.written<RowNumber>(n);
      return;
    }
    const auto first = static_cast<std::size_t>(arena.below(n + 1));
    for (const std::size_t count : {first, n - first}) {
      const std::span<std::int32_t> part = arena.written<std::int32_t>(count);
      parts.push_back({part.data() - arena.narrow().data(), static_cast<std::int64_t>(count)});
    }
    store = {arena.narrow(), {}, parts, {}};
    call.store = &store;
  }

  std::set<Key> keys() const {
    std::set<Key> all(call.keys.begin(), call.keys.end());
    for (const std::span<const Key> piece : pieces) all.insert(piece.begin(), piece.end());
    return all;
  }

  std::vector<std::span<const Key>> pieces;
  std::vector<NumberedKeys> parts;
  StoreNumbers store;
  IndexMapCall call;
};

Index& add_index(std::deque<Index>& indexes) {
  EvictConfig eviction;
  eviction.clock = EvictClock::kTime;
  eviction.ttl = 1000;
  AdmitConfig admission;
  admission.rule = {AdmitTerm{}};
  Index& added =
      indexes.emplace_back(IndexConfig{.name = "number " + std::to_string(indexes.size()),
                                       .eviction = eviction,
                                       .admission = admission});
  added.set_time(0);
  return added;
}

// Returns whether the call was refused.
bool map_drawn(std::mt19937_64& random) {
  test::Arena arena(random, 16 + std::uniform_int_distribution<std::size_t>(0, 250)(random));
  arena.fill();
  std::deque<Index> indexes;
  std::deque<DrawnCall> drawn;
  std::vector<IndexMapCall> calls;
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = arena.below(4); i >= 0; --i) {
    const DrawnCall& made = drawn.emplace_back(add_index(indexes), arena);
    calls.push_back(made.call);
    sizes.push_back(std::ssize(made.keys()));
  }
  const std::vector<std::int64_t> before = arena.words();
  std::string message;
  try {
    map_indexes(calls);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  EXPECT_EQ(message.empty(), !arena.has_overlap()) << message;
  for (std::size_t i = 0; i < indexes.size(); ++i) {
    EXPECT_EQ(indexes[i].size(), message.empty() ? sizes[i] : 0);
    EXPECT_EQ(indexes[i].stats().admission_records, 0);
  }
  if (message.empty()) return false;
  EXPECT_NE(message.find("; pass arrays of their own"), std::string::npos) << message;
  EXPECT_EQ(arena.words(), before);
  return true;
}

TEST(Apart, WhatCallsOverManyWriteLiesOverNothingOfAnyOfThem) {
  std::mt19937_64 random(20);
  const int num_calls = test::is_full_profile() ? 200000 : 4000;
  int num_refused = 0;
  for (int i = 0; i < num_calls && !::testing::Test::HasFailure(); ++i)
    num_refused += map_drawn(random) ? 1 : 0;
  EXPECT_GT(num_refused, num_calls / 10);
  EXPECT_LT(num_refused, num_calls - num_calls / 10);
}

struct DrawnArrays {
  std::vector<internal::CallArray> written;
  std::vector<internal::CallArray> read;
};

/// Of one stretch or several.
DrawnArrays draw_arrays(test::Arena& arena, std::size_t most) {
  DrawnArrays all;
  const std::int64_t usual_width = 1 + arena.below(3);
  const std::int64_t usual_stride = usual_width + arena.below(9);
  for (std::int64_t i = arena.below(most); i >= 0; --i) {
    const bool is_usual = arena.below(4) != 0;
    const std::int64_t width = is_usual ? usual_width : 1 + arena.below(4);
    const std::int64_t stride = is_usual ? usual_stride : width + arena.below(9);
    const bool is_written = arena.below(3) != 0;
    const char* const name = arena.below(2) == 0 ? "vectors" : "gradients";
    const test::Vectors drawn =
        is_written ? arena.vectors_written(width, stride) : arena.vectors_read(width, stride);
    auto& those = is_written ? all.written : all.read;
    those.emplace_back(name, drawn.first, width, stride, drawn.count, those.size());
  }
  // As they lie, in part: so they are few runs, or columns from left to right.
  for (auto* const those : {&all.written, &all.read}) {
    if (arena.below(3) != 0) std::ranges::sort(*those, {}, &internal::CallArray::begin);
  }
  return all;
}

enum class Seen { kOver, kApart, kApartAtOnce };

Seen draw_overlapping(std::mt19937_64& random) {
  const auto size = std::uniform_int_distribution<std::size_t>(0, 400)(random);
  test::Arena arena(random, 8 + size);
  const DrawnArrays all = draw_arrays(arena, 4 + size / 16);
  internal::ArrayRuns runs;
  for (const internal::CallArray& each : all.written) runs.add_written(each);
  for (const internal::CallArray& each : all.read) runs.add_read(each);
  const auto found = internal::find_overlap(all.written, all.read);
  EXPECT_EQ(found.has_value(), arena.has_overlap());
  EXPECT_TRUE(!found || found->written.lies_over(found->other));
  EXPECT_FALSE(found && runs.are_apart());
  if (found) return Seen::kOver;
  return runs.are_apart() ? Seen::kApartAtOnce : Seen::kApart;
}

TEST(Apart, VectorsLieOverOthersThatHaveABytesOfOneOfThem) {
  std::mt19937_64 random(21);
  const int num_tries = test::is_full_profile() ? 1000000 : 40000;
  std::map<Seen, int> seen;
  for (int i = 0; i < num_tries && !::testing::Test::HasFailure(); ++i)
    ++seen[draw_overlapping(random)];
  EXPECT_GT(seen[Seen::kOver], num_tries / 10);
  EXPECT_GT(seen[Seen::kApart], num_tries / 50);
  EXPECT_GT(seen[Seen::kApartAtOnce], num_tries / 20);
}

std::int64_t below(std::mt19937_64& random, std::int64_t end) {
  return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random);
}

/// The pieces of a matrix, cut into blocks of rows and columns: all of it is written once.
std::vector<internal::CallArray> cut_matrix(std::mt19937_64& random, std::vector<float>& matrix,
                                            std::int64_t width) {
  std::vector<internal::CallArray> pieces;
  const std::int64_t height = std::ssize(matrix) / width;
  for (std::int64_t row = 0, num_rows = 0; row < height; row += num_rows) {
    num_rows = std::min(1 + below(random, 9), height - row);
    for (std::int64_t column = 0, num_columns = 0; column < width; column += num_columns) {
      num_columns = std::min(1 + below(random, 3), width - column);
      pieces.emplace_back("vectors", &matrix[static_cast<std::size_t>(row * width + column)],
                          num_columns, width, num_rows, pieces.size());
    }
  }
  if (below(random, 2) == 0) std::ranges::shuffle(pieces, random);
  return pieces;
}

TEST(Apart, PiecesOfAMatrixLieApartUntilOneIsTakenTwice) {
  std::mt19937_64 random(22);
  std::size_t num_pieces = 0;
  for (int i = 0; i < (test::is_full_profile() ? 2000 : 200); ++i) {
    const std::int64_t width = 1 + below(random, 40);
    std::vector<float> matrix(static_cast<std::size_t>(width * (1 + below(random, 60))));
    std::vector<internal::CallArray> pieces = cut_matrix(random, matrix, width);
    num_pieces = std::max(num_pieces, pieces.size());
    ASSERT_FALSE(internal::find_overlap(pieces, {}));
    const auto twice = pieces[static_cast<std::size_t>(below(random, std::ssize(pieces)))];
    ASSERT_TRUE(internal::find_overlap(pieces, {&twice, 1}));
    pieces.push_back(twice);
    const auto found = internal::find_overlap(pieces, {});
    ASSERT_TRUE(found);
    ASSERT_EQ(found->written.call, twice.call);
    ASSERT_EQ(found->other.call, twice.call);
  }
  EXPECT_GT(num_pieces, 200U);
}

TEST(Apart, ColumnsOfAMatrixFromLeftToRightAreSeenToLieApartAtOnce) {
  std::vector<float> matrix(64);
  std::vector<std::int64_t> rows(64);
  for (const std::int64_t num_rows : {1, 2, 8}) {
    internal::ArrayRuns runs;
    for (std::size_t column = 0; column < 8; ++column) {
      runs.add_written({"vectors", &matrix[column], 1, 8, num_rows, column});
      runs.add_read({"rows", std::span(rows).subspan(column, 8), column});
    }
    EXPECT_TRUE(runs.are_apart());
    runs.add_written({"vectors", &matrix[7], 1, 8, num_rows, 8});
    EXPECT_FALSE(runs.are_apart());
  }
}

std::string refusal(std::span<const IndexMapCall> calls) {
  try {
    map_indexes(calls);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// Times are read once outcomes are written.
TEST(Apart, OutcomesOfCallsThatGiveValuesLieOverNoTimes) {
  TableConfig config;
  config.dim = 1;
  config.max_rows = 2;
  config.eviction = EvictConfig{.clock = EvictClock::kTime};
  Table table(config);
  const std::vector<Key> keys = {1, 2};
  const std::vector<std::int64_t> times = {5, 6};
  std::vector<std::int64_t> own = times;
  std::vector<float> values(2);
  const std::span over(reinterpret_cast<Outcome*>(own.data()), 2);
  EXPECT_THROW(table.find_or_insert(keys, values.data(), over, nullptr, {.times = own}),
               std::invalid_argument);
  EXPECT_THROW(table.upsert(keys, values.data(), nullptr, over, {.times = own}),
               std::invalid_argument);
  EXPECT_EQ(own, times);
  EXPECT_EQ(table.stats().num_rows, 0);
  table.find_or_insert(keys, values.data(), {}, nullptr, {.times = own});
  EXPECT_EQ(table.stats().num_rows, 2);
}

TEST(Apart, ARefusalNamesBothArraysAndWhoseTheyAre) {
  Index first({.name = "first"});
  Index second({.name = "second"});
  std::vector<std::int64_t> numbers(8);
  std::vector<Outcome> outcomes(4);
  const std::span words(numbers);
  const std::span said(outcomes);
  std::vector<IndexMapCall> calls = {
      {&first, words.first(2), words.subspan(2, 2), said.first(2), {.insert = true}},
      {&second, words.subspan(4, 2), words.subspan(6, 2), said.last(2), {.insert = true}}};
  calls[0].rows = words.subspan(5, 2);
  EXPECT_EQ(refusal(calls),
            "index 'first': rows lie over rows of index 'second'; pass arrays of their own");
  calls[0].rows = words.subspan(4, 2);
  EXPECT_EQ(refusal(calls),
            "index 'first': rows lie over keys of index 'second'; pass arrays of their own");
  calls[0].rows = words.subspan(1, 2);
  EXPECT_EQ(refusal(calls), "index 'first': rows lie over its keys; pass arrays of their own");
  EXPECT_EQ(first.size() + second.size(), 0);
  calls[0].rows = words.subspan(2, 2);
  EXPECT_EQ(refusal(calls), "");
}

}  // namespace
}  // namespace recsdk::apart_test
