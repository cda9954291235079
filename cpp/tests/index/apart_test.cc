// Arrays of a call over many indexes that lie over each other, against a count of uses a byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
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

/// Arrays of one stretch or several, of which some are written.
bool draw_overlapping(std::mt19937_64& random) {
  test::Arena arena(random, 8 + std::uniform_int_distribution<std::size_t>(0, 60)(random));
  std::vector<internal::CallArray> written;
  std::vector<internal::CallArray> read;
  const std::int64_t usual_width = 1 + arena.below(3);
  const std::int64_t usual_stride = usual_width + arena.below(9);
  for (std::int64_t i = arena.below(7); i >= 0; --i) {
    const bool is_usual = arena.below(3) != 0;
    const std::int64_t width = is_usual ? usual_width : 1 + arena.below(4);
    const std::int64_t stride = is_usual ? usual_stride : width + arena.below(9);
    const bool is_written = arena.below(3) != 0;
    const test::Vectors drawn =
        is_written ? arena.vectors_written(width, stride) : arena.vectors_read(width, stride);
    (is_written ? written : read)
        .emplace_back("vectors", drawn.first, width, stride, drawn.count, written.size());
  }
  const auto found = internal::find_overlap(written, read);
  EXPECT_EQ(found.has_value(), arena.has_overlap());
  EXPECT_TRUE(!found || found->written.lies_over(found->other));
  return found.has_value();
}

TEST(Apart, VectorsLieOverOthersThatHaveABytesOfOneOfThem) {
  std::mt19937_64 random(21);
  const int num_tries = test::is_full_profile() ? 1000000 : 40000;
  int num_over = 0;
  for (int i = 0; i < num_tries && !::testing::Test::HasFailure(); ++i)
    num_over += draw_overlapping(random) ? 1 : 0;
  EXPECT_GT(num_over, num_tries / 10);
  EXPECT_LT(num_over, num_tries - num_tries / 10);
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
