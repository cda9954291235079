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
#include "support/profile.h"
#include "util/apart.h"

namespace recsdk::apart_test {
namespace {

/// Memory in which arrays lie where chance puts them.
class Arena {
 public:
  Arena(std::mt19937_64& random, std::size_t num_words)
      : random_(random), words_(num_words), written_(8 * num_words), read_(8 * num_words) {
    // As any of what is drawn: keys, times, and counts, which are 1 or more.
    for (std::int64_t& word : words_) word = 1 + below(9);
  }

  std::int64_t below(std::size_t end) {
    return std::uniform_int_distribution<std::int64_t>(0,
                                                       static_cast<std::int64_t>(end) - 1)(random_);
  }

  template <typename Item>
  std::span<Item> written(std::size_t count) {
    return draw<Item>(count, written_);
  }
  template <typename Item>
  std::span<const Item> read(std::size_t count) {
    return draw<Item>(count, read_);
  }
  /// All of it, as what parts of `written` numbers lie in.
  std::span<std::int32_t> narrow() {
    return {reinterpret_cast<std::int32_t*>(words_.data()), 2 * words_.size()};
  }

  bool has_overlap() const {
    for (std::size_t i = 0; i < written_.size(); ++i) {
      if (written_[i] > 1 || (written_[i] == 1 && read_[i] > 0)) return true;
    }
    return false;
  }
  const std::vector<std::int64_t>& words() const { return words_; }

 private:
  template <typename Item>
  std::span<Item> draw(std::size_t count, std::vector<int>& uses) {
    auto* const items = reinterpret_cast<Item*>(words_.data());
    const std::size_t room = 8 * words_.size() / sizeof(Item) - count;
    const auto begin = static_cast<std::size_t>(below(room + 1));
    for (std::size_t i = begin * sizeof(Item); i < (begin + count) * sizeof(Item); ++i) ++uses[i];
    return {items + begin, count};
  }

  std::mt19937_64& random_;
  std::vector<std::int64_t> words_;
  std::vector<int> written_;  // uses of each byte
  std::vector<int> read_;
};

/// A call with arrays anywhere in the memory.
struct DrawnCall {
  DrawnCall(Index& index, Arena& arena) {
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
  Arena arena(random, 16 + std::uniform_int_distribution<std::size_t>(0, 250)(random));
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

TEST(Apart, VectorsLieOverAnArrayThatHasABytesOfOneOfThem) {
  std::mt19937_64 random(21);
  std::vector<float> memory(64);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(memory));
  const auto below = [&](std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(random);
  };
  int num_over = 0;
  constexpr int kNumTries = 20000;
  for (int i = 0; i < kNumTries; ++i) {
    const std::int64_t width = 1 + below(4);
    const std::int64_t stride = width + below(5);
    const std::int64_t count = below(5);
    const std::int64_t first = below(8);
    const std::int64_t begin = below(200);
    const std::int64_t size = below(30);
    bool is_over = false;
    for (std::int64_t at = begin; at < begin + size; ++at) {
      const std::int64_t number = at / 4 - first;
      is_over = is_over || (number >= 0 && number / stride < count && number % stride < width);
    }
    const internal::CallVectors vectors{"vectors", memory.data() + first, width, stride, count};
    const internal::CallArray array(
        "array", bytes.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)));
    ASSERT_EQ(vectors.lies_over(array), is_over)
        << count << " of " << width << " every " << stride << " from " << first << ", and " << size
        << " bytes from " << begin;
    num_over += is_over ? 1 : 0;
  }
  EXPECT_GT(num_over, kNumTries / 10);
  EXPECT_LT(num_over, kNumTries - kNumTries / 10);
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
