// Inserting batches: row numbers and outcomes are those of first sight, however many keys of a
// batch are new.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "recsdk/recsdk.h"
#include "support/room_model.h"
#include "util/hash.h"

namespace recsdk::insertion_test {
namespace {

struct Answer {
  explicit Answer(std::size_t size) : rows(size), outcomes(size) {}
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

// What map with insertion answers: rows freed last are given first, then new ones.
class Model {
 public:
  explicit Model(std::optional<std::int64_t> max_rows) : max_rows_(max_rows) {}

  Answer map(const std::vector<Key>& keys) {
    Answer answer(keys.size());
    const auto refused = test::refused_keys(keys, rows_, max_rows_);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto known = rows_.find(keys[i]);
      if (known != rows_.end()) {
        answer.outcomes[i] = Outcome::kFound;
        answer.rows[i] = known->second;
      } else if (refused.contains(keys[i])) {
        answer.outcomes[i] = Outcome::kRefused;
      } else {
        answer.outcomes[i] = Outcome::kInserted;
        answer.rows[i] = rows_[keys[i]] = next_row();
      }
    }
    return answer;
  }

  void erase(const std::vector<Key>& keys) {
    for (const Key key : keys) {
      const auto known = rows_.find(key);
      if (known == rows_.end()) continue;
      free_.push_back(known->second);
      rows_.erase(known);
    }
  }

  std::int64_t size() const { return std::ssize(rows_); }

 private:
  RowNumber next_row() {
    if (free_.empty()) return end_++;
    const RowNumber row = free_.back();
    free_.pop_back();
    return row;
  }

  std::optional<std::int64_t> max_rows_;
  std::unordered_map<Key, RowNumber> rows_;
  std::vector<RowNumber> free_;
  RowNumber end_ = 0;
};

// Batches with no, some or only new keys, some of them twice, and as many keys as there may come
// at once.
class Batches {
 public:
  explicit Batches(std::uint64_t seed) : random_(seed) {}

  std::vector<Key> next() {
    const std::uint64_t new_percent = random_() % 5 * 25;
    std::vector<Key> keys(random_() % 20000);
    for (Key& key : keys) {
      const bool is_new = num_known_ == 0 || random_() % 100 < new_percent;
      key = key_of(is_new ? num_known_++ : random_() % num_known_);
    }
    return keys;
  }
  std::vector<Key> known(std::size_t count) {
    std::vector<Key> keys(count);
    for (Key& key : keys) key = key_of(random_() % std::max<std::uint64_t>(num_known_, 1));
    return keys;
  }

 private:
  static Key key_of(std::uint64_t number) { return static_cast<Key>(internal::mix64(number)); }

  std::mt19937_64 random_;
  std::uint64_t num_known_ = 0;
};

struct Case {
  std::uint64_t seed;
  std::optional<std::int64_t> max_rows;
  int num_threads;
};

class Insertion : public testing::TestWithParam<Case> {};

TEST_P(Insertion, GivesRowsInTheOrderOfFirstSight) {
  TableConfig config;
  config.dim = 1;
  config.max_rows = GetParam().max_rows;
  config.num_threads = GetParam().num_threads;
  config.hash_seed = GetParam().seed;
  Table table(config);
  Model model(config.max_rows);
  Batches batches(GetParam().seed);
  for (int i = 0; i < 12; ++i) {
    const std::vector<Key> keys = batches.next();
    Answer answer(keys.size());
    table.map(keys, answer.rows, answer.outcomes, {.insert = true});
    const Answer expected = model.map(keys);
    ASSERT_EQ(answer.outcomes, expected.outcomes);
    for (std::size_t k = 0; k < keys.size(); ++k) {
      if (has_row(answer.outcomes[k])) {
        ASSERT_EQ(answer.rows[k], expected.rows[k]) << "key " << k;
      }
    }
    if (i % 4 == 3) {
      const std::vector<Key> leaving = batches.known(500);
      table.erase(leaving);
      model.erase(leaving);
    }
    ASSERT_EQ(table.size(), model.size());
    ASSERT_NO_THROW(table.check_invariants());
  }
}
INSTANTIATE_TEST_SUITE_P(Cases, Insertion,
                         testing::Values(Case{1, std::nullopt, 1}, Case{2, std::nullopt, 3},
                                         Case{3, 30000, 1}, Case{4, 30000, 3}, Case{5, 4097, 1},
                                         Case{6, std::nullopt, 1}),
                         [](const auto& p) { return "seed" + std::to_string(p.param.seed); });

class FullTable : public testing::TestWithParam<int> {
 protected:
  static TableConfig config_of(std::int64_t max_rows) {
    TableConfig config;
    config.dim = 2;
    config.max_rows = max_rows;
    config.eviction_groups = 1;
    config.on_full = OnFull::kRaise;
    config.num_threads = GetParam();
    return config;
  }

  // Calls that would need one row more than there is.
  static void expect_full(Table& table, const std::vector<Key>& keys) {
    const std::int64_t size = table.size();
    Answer answer(keys.size());
    std::vector<float> values(2 * keys.size(), 1.0F);
    const auto expect = [&](const auto& call) {
      try {
        call();
        ADD_FAILURE() << "the call went through";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCapacity);
        EXPECT_NE(std::string(error.what()).find("is full"), std::string::npos) << error.what();
      }
      EXPECT_EQ(table.size(), size);
      ASSERT_NO_THROW(table.check_invariants());
    };
    expect([&] { table.map(keys, answer.rows, answer.outcomes, {.insert = true}); });
    expect([&] { table.find_or_insert(keys, values.data()); });
    expect([&] { table.upsert(keys, values.data()); });
    expect([&] {
      const Lease lease = table.lease(1);
      table.map(keys, answer.rows, answer.outcomes, {.insert = true, .lease = &lease});
    });
  }
};

TEST_P(FullTable, RaisesAndChangesNothing) {
  constexpr std::int64_t kRows = 10'000;
  Table table(config_of(kRows));
  std::vector<Key> keys(kRows + 1);
  for (std::size_t i = 0; i < keys.size(); ++i)
    keys[i] = static_cast<Key>(internal::mix64(std::uint64_t{i}));
  expect_full(table, keys);
  EXPECT_EQ(table.stats().num_rows, 0);
  const std::vector<Key> fitting(keys.begin(), keys.end() - 1);
  Answer answer(fitting.size());
  table.map(fitting, answer.rows, answer.outcomes, {.insert = true});
  for (std::size_t i = 0; i < fitting.size(); ++i) {
    ASSERT_EQ(answer.outcomes[i], Outcome::kInserted);
    ASSERT_EQ(answer.rows[i], static_cast<RowNumber>(i));
  }
  expect_full(table, {keys[0], keys.back(), keys[1]});
  table.map(fitting, answer.rows, answer.outcomes, {.insert = true});
  EXPECT_EQ(answer.outcomes.back(), Outcome::kFound);
  table.erase(std::vector<Key>{keys[7]});
  const std::vector<Key> twice = {keys.back(), keys.back()};  // one row
  Answer last(2);
  table.map(twice, last.rows, last.outcomes, {.insert = true});
  EXPECT_EQ(last.outcomes, (std::vector{Outcome::kInserted, Outcome::kFound}));
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(Outcome::kRefused)], 0U);
}
INSTANTIATE_TEST_SUITE_P(Threads, FullTable, testing::Values(1, 3));

// A table that has had keys counted from somewhere, whose rows are mapped directly.
TEST(InsertionBesideDensePages, GivesRowsInTheOrderOfFirstSight) {
  TableConfig config;
  config.dim = 1;
  Table table(config);
  Model model(std::nullopt);
  Batches batches(7);
  for (Key first = 0; first < 60000; first += 10000) {
    std::vector<Key> keys(10000);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = first + static_cast<Key>(i);
    const std::vector<Key> others = batches.next();
    keys.insert(keys.end(), others.begin(), others.end());
    Answer answer(keys.size());
    table.map(keys, answer.rows, answer.outcomes, {.insert = true});
    const Answer expected = model.map(keys);
    ASSERT_EQ(answer.outcomes, expected.outcomes);
    ASSERT_EQ(answer.rows, expected.rows);
  }
  EXPECT_GT(table.stats().index_dense_keys, 0);
  ASSERT_NO_THROW(table.check_invariants());
}

TEST(InsertionAfterReserve, UsesTheMemoryThatWasReserved) {
  TableConfig config;
  config.name = "reserved";
  config.dim = 1;
  Table table(config);
  table.reserve(2'000'000);
  const std::int64_t reserved = table.stats().index_bytes;
  std::mt19937_64 random(7);
  std::vector<Key> keys(1 << 16);
  Answer answer(keys.size());
  while (table.size() < 1'000'000) {
    for (Key& key : keys) key = static_cast<Key>(random());
    table.map(keys, answer.rows, answer.outcomes, {.insert = true});
    ASSERT_GE(table.stats().index_bytes, reserved);
  }
  EXPECT_LE(table.stats().index_bytes, reserved + reserved / 4);
  table.check_invariants();
}

}  // namespace
}  // namespace recsdk::insertion_test
