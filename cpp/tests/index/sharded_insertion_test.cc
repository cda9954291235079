// Insertion of large batches on several threads: every answer is the one thread's, and a call that
// fails leaves everything as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "failing_allocations.h"
#include "failing_operator_new.h"
#include "recsdk/recsdk.h"
#include "util/hash.h"
#include "util/memory.h"

namespace recsdk::test::sharded_insertion_test {
namespace {

using Keys = std::vector<Key>;

struct Answer {
  Answer(Index& index, const Keys& keys, const Lease* lease = nullptr)
      : rows(keys.size(), -1), outcomes(keys.size()) {
    index.map(keys, rows, outcomes, {.insert = true, .lease = lease});
  }
  bool operator==(const Answer&) const = default;
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

IndexConfig config_of(int num_threads) {
  IndexConfig config;
  config.name = "sharded";
  config.hash_seed = 11;
  config.num_threads = num_threads;
  return config;
}

// Which key a number stands for.
using KeyOf = std::function<Key(std::uint64_t)>;

Key scattered(std::uint64_t i) { return static_cast<Key>(internal::mix64(i)); }
Key far_apart(std::uint64_t i) { return static_cast<Key>(i << 40 | i >> 24); }
Key downwards(std::uint64_t i) { return -static_cast<Key>(i * 4096); }
Key close_together(std::uint64_t i) { return static_cast<Key>(i); }

// Keys of numbers below `end`, `new_percent` of them from `begin` on; many come several times.
Keys batch(const KeyOf& key_of, std::uint64_t begin, std::uint64_t end, std::uint64_t new_percent,
           std::size_t count, std::mt19937_64& random) {
  Keys keys(count);
  for (Key& key : keys) {
    const bool is_new = begin == 0 || random() % 100 < new_percent;
    key = key_of(is_new ? begin + random() % (end - begin) : random() % begin);
  }
  return keys;
}

struct Case {
  const char* name;
  KeyOf key_of;
  int num_threads;
  std::optional<std::int64_t> max_rows;
};

class ShardedInsertion : public testing::TestWithParam<Case> {
 protected:
  ShardedInsertion() { set_num_threads(16); }
  ~ShardedInsertion() override { set_num_threads(threads_before_); }

  static void check_equal(const Index& index, const Index& alone) {
    ASSERT_NO_THROW(index.check_invariants());
    const IndexStats stats = index.stats();
    const IndexStats expected = alone.stats();
    ASSERT_TRUE(std::equal(std::begin(stats.outcomes), std::end(stats.outcomes),
                           std::begin(expected.outcomes)));
    ASSERT_EQ(index.size(), alone.size());
  }

 private:
  const int threads_before_ = num_threads();
};

TEST_P(ShardedInsertion, AnswersAsOneThreadDoes) {
  IndexConfig config = config_of(GetParam().num_threads);
  config.max_rows = GetParam().max_rows;
  Index index(config);
  config.num_threads = 1;
  Index alone(config);
  std::mt19937_64 random(3);
  constexpr std::uint64_t kNew = 90'000;
  for (std::uint64_t turn = 0; turn < 8; ++turn) {
    const Keys keys = batch(GetParam().key_of, turn * kNew, (turn + 1) * kNew,
                            turn % 3 == 2 ? 30 : 95, turn == 4 ? 400'000 : 120'000, random);
    const bool has_step = turn % 2 == 1;
    Lease lease = has_step ? index.lease(static_cast<std::int64_t>(turn)) : Lease();
    Lease lease_alone = has_step ? alone.lease(static_cast<std::int64_t>(turn)) : Lease();
    const Answer answer(index, keys, has_step ? &lease : nullptr);
    ASSERT_EQ(answer, Answer(alone, keys, has_step ? &lease_alone : nullptr));
    lease.release();
    lease_alone.release();
    check_equal(index, alone);
    if (turn % 3 != 1) continue;
    const Keys leaving = batch(GetParam().key_of, 0, turn * kNew, 0, 30'000, random);
    index.erase(leaving);
    alone.erase(leaving);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int threads : {2, 5, 16}) {
    all.push_back({"scattered", scattered, threads, std::nullopt});
    all.push_back({"scattered_and_limited", scattered, threads, 310'000});
  }
  all.push_back({"far_apart", far_apart, 5, 310'000});
  all.push_back({"downwards", downwards, 5, std::nullopt});
  all.push_back({"close_together", close_together, 5, std::nullopt});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, ShardedInsertion, testing::ValuesIn(cases()), [](const auto& p) {
  return std::string(p.param.name) + "_" + std::to_string(p.param.num_threads);
});

// An index in the middle of its life, with rows to be used again.
class ShardedFailure : public testing::Test {
 protected:
  static constexpr std::uint64_t kOld = 300'000;
  static constexpr std::size_t kErased = 5'000;

  ShardedFailure() : keys_(60'000), more_(400'000) {
    set_num_threads(5);
    Keys old(kOld);
    for (std::size_t i = 0; i < old.size(); ++i) old[i] = scattered(i);
    for (std::size_t i = 0; i < keys_.size(); ++i) keys_[i] = scattered(kOld + i % 50'000);
    for (std::size_t i = 0; i < more_.size(); ++i) more_[i] = scattered(2 * kOld + i);
    for (Index* index : {&index_, &twin_}) {
      const Answer answer(*index, old);
      index->erase(std::span(old).first(kErased));
    }
    internal::set_page_allocation_hook(fail_pages);
  }
  ~ShardedFailure() override {
    internal::set_page_allocation_hook(nullptr);
    set_num_threads(threads_before_);
  }

  // As before the call, to readers.
  void check_unchanged() {
    ASSERT_EQ(index_.size(), static_cast<std::int64_t>(kOld - kErased));
    ASSERT_NO_THROW(index_.check_invariants());
    std::vector<RowNumber> rows(keys_.size());
    std::vector<Outcome> outcomes(keys_.size());
    index_.map(keys_, rows, outcomes, {});
    ASSERT_EQ(std::count(outcomes.begin(), outcomes.end(), Outcome::kMissing), std::ssize(keys_));
  }

  Index index_{limited(5)};
  Index twin_{limited(1)};
  Keys keys_;
  Keys more_;  // more than there may be

 private:
  static IndexConfig limited(int num_threads) {
    IndexConfig config = config_of(num_threads);
    config.max_rows = 500'000;
    config.on_full = OnFull::kRaise;
    return config;
  }

  const int threads_before_ = num_threads();
};

TEST_F(ShardedFailure, OfAnyAllocationLeavesEverything) {
  std::vector<RowNumber> rows(keys_.size());
  std::vector<Outcome> outcomes(keys_.size());
  int num_failed = 0;
  for (std::int64_t n = 0;; n += 1 + n / 16) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    const Ending ending =
        run_failing(n, [&] { index_.map(keys_, rows, outcomes, {.insert = true}); });
    if (ending != Ending::kOutOfMemory) break;
    ++num_failed;
    ASSERT_NO_FATAL_FAILURE(check_unchanged());
  }
  EXPECT_GT(num_failed, 20);
  const Answer expected(twin_, keys_);
  EXPECT_EQ(rows, expected.rows);
  EXPECT_EQ(outcomes, expected.outcomes);
  index_.check_invariants();
}

TEST_F(ShardedFailure, OfALimitLeavesEverything) {
  try {
    const Answer answer(index_, more_);
    FAIL() << "the call went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCapacity);
  }
  check_unchanged();
  EXPECT_EQ(Answer(index_, keys_), Answer(twin_, keys_));
}

}  // namespace
}  // namespace recsdk::test::sharded_insertion_test
