// Calls side by side, and results that do not depend on the number of threads. Meant to run under
// -fsanitize=thread too.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <queue>
#include <thread>
#include <vector>

#include "recsdk/recsdk.h"

namespace recsdk::test::threads_test {
namespace {

using Keys = std::vector<Key>;
using Floats = std::vector<float>;

Keys range(Key first, std::size_t count) {
  Keys keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config(std::int64_t dim) {
  TableConfig config;
  config.dim = dim;
  config.optimizer = OptimizerConfig::adagrad(0.1F);
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  return config;
}

/// Keys of many batches: skewed, with duplicates, and new ones in every batch.
Keys batch_keys(std::int64_t step, std::size_t size) {
  Keys keys;
  std::uint64_t x = static_cast<std::uint64_t>(step) + 1;
  for (std::size_t i = 0; i < size; ++i) {
    x = x * 6364136223846793005U + 1442695040888963407U;
    const auto r = static_cast<std::int64_t>(x >> 40);
    keys.push_back(i % 3 == 0 ? r % 50 : r % 5000 - step);
  }
  return keys;
}

struct Exported {
  Keys keys;
  Floats weights;
  Floats state;
  bool operator==(const Exported&) const = default;
};

Exported export_all(const Table& table) {
  const auto n = static_cast<std::size_t>(table.size());
  const auto dim = static_cast<std::size_t>(table.config().dim);
  Exported all{Keys(n), Floats(n * dim),
               Floats(n * static_cast<std::size_t>(table.layout().state_width()))};
  RowNumber begin = 0;
  if (n > 0)
    table.export_rows(begin, {table.size(), all.keys.data(), all.weights.data(), all.state.data()});
  return all;
}

/// A batch on its way from mapping to update.
struct Mapped {
  Lease lease;
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

Mapped map_batch(Table& table, std::int64_t step, std::size_t size) {
  const Keys keys = batch_keys(step, size);
  Mapped batch{table.lease(step), std::vector<RowNumber>(size), std::vector<Outcome>(size)};
  table.map(keys, batch.rows, batch.outcomes, {.insert = true, .lease = &batch.lease});
  return batch;
}

/// Pools each key, takes the vectors for gradients, and updates: what a row gets depends on all
/// before it.
void train_batch(Table& table, Mapped& batch) {
  const std::int64_t dim = table.config().dim;
  Floats out(batch.rows.size() * static_cast<std::size_t>(dim));
  PoolBlock forward{.bags = {}, .out = out.data(), .stride = dim};
  forward.bags.rows = batch.rows;
  forward.bags.outcomes = batch.outcomes;
  table.pool({&forward, 1});
  const GradBlock backward{
      .bags = forward.bags, .grad = out.data(), .stride = dim, .weights_grad = nullptr};
  table.update({&backward, 1});
  batch.lease.release();
}

class ThreadsTest : public testing::Test {
 protected:
  ~ThreadsTest() override { set_num_threads(threads_before_); }
  int threads_before_ = num_threads();
};

TEST_F(ThreadsTest, OneOfThemFinishesACutOfAnIndex) {
  Index index({});
  index.cut().finish(true);
  std::vector<RowNumber> rows(1);
  std::vector<Outcome> outcomes(1);
  for (Key key = 0; key < 100; ++key) {
    index.map(Keys{key}, rows, outcomes, {.insert = true});
    IndexCut cut = index.cut(true);
    std::thread other([&] { cut.finish(false); });
    cut.finish(false);
    other.join();
  }
  EXPECT_EQ(index.cut(true).keys().size(), 100U);
}

TEST_F(ThreadsTest, ResultsDoNotDependOnTheNumberOfThreads) {
  constexpr std::size_t kKeys = 40'000;  // several pieces of every parallel loop
  std::vector<Exported> results;
  for (const int count : {1, 2, 3, 7}) {
    set_num_threads(count);
    Table table(config(5));
    for (std::int64_t step = 0; step < 3; ++step) {
      Mapped batch = map_batch(table, step, kKeys);
      train_batch(table, batch);
    }
    table.erase(range(100, 1000));
    Floats values(kKeys * 5);
    table.find_or_insert(range(0, kKeys), values.data());
    table.apply_gradients(range(-500, kKeys), values.data());
    table.check_invariants();
    results.push_back(export_all(table));
  }
  EXPECT_GE(results[0].keys.size(), kKeys);
  for (const Exported& result : results) EXPECT_TRUE(result == results[0]);
}

TEST_F(ThreadsTest, MappingAheadChangesNoResult) {
  constexpr std::int64_t kSteps = 40;
  constexpr std::size_t kBatch = 500;
  Table one_by_one(config(3));
  for (std::int64_t step = 0; step < kSteps; ++step) {
    Mapped batch = map_batch(one_by_one, step, kBatch);
    train_batch(one_by_one, batch);
  }

  Table ahead(config(3));
  std::mutex mutex;
  std::condition_variable changed;
  std::queue<Mapped> queue;
  std::thread mapper([&] {
    for (std::int64_t step = 0; step < kSteps; ++step) {
      Mapped batch = map_batch(ahead, step, kBatch);
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return queue.size() < 6; });
      queue.push(std::move(batch));
      changed.notify_all();
    }
  });
  for (std::int64_t step = 0; step < kSteps; ++step) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !queue.empty(); });
    Mapped batch = std::move(queue.front());
    queue.pop();
    changed.notify_all();
    lock.unlock();
    train_batch(ahead, batch);
  }
  mapper.join();
  EXPECT_TRUE(export_all(ahead) == export_all(one_by_one));
  EXPECT_EQ(ahead.stats().updates, one_by_one.stats().updates);
}

TEST_F(ThreadsTest, ReadersSeeWholeRows) {
  TableConfig constant = config(8);
  constant.initializer = InitializerConfig::constant(2.0F);
  constant.default_row.value = -1.0F;
  Table table(constant);
  const Keys all = range(-10'000, 20'000);
  std::atomic<bool> is_done{false};
  std::atomic<bool> all_whole{true};
  const auto read = [&] {
    Floats values(all.size() * 8);
    std::vector<Outcome> outcomes(all.size());
    do {
      table.lookup(all, values.data(), outcomes);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float wanted = has_row(outcomes[i / 8]) ? 2.0F : -1.0F;
        if (values[i] != wanted) all_whole = false;
      }
    } while (!is_done);
  };
  std::thread reader(read);
  std::thread other_reader(read);
  Floats values(500 * 8);
  for (Key first = -10'000; first < 10'000; first += 500) {
    table.find_or_insert(range(first, 500), values.data());
  }
  is_done = true;
  reader.join();
  other_reader.join();
  EXPECT_TRUE(all_whole);
  EXPECT_EQ(table.size(), 20'000);
}

TEST_F(ThreadsTest, ReadersSeeAPrefixOfTheSteps) {
  constexpr std::size_t kSteps = 200;
  Table table(config(1));
  const Keys one_of_each = range(0, kSteps);  // step s inserts key s
  std::atomic<bool> is_done{false};
  std::atomic<bool> always_a_prefix{true};
  std::thread reader([&] {
    Floats values(kSteps);
    std::vector<Outcome> outcomes(kSteps);
    do {
      table.lookup(one_of_each, values.data(), outcomes);
      if (!std::is_sorted(outcomes.begin(), outcomes.end())) always_a_prefix = false;
    } while (!is_done);
  });
  std::queue<Lease> leases;
  for (Key step = 0; step < static_cast<Key>(kSteps); ++step) {
    leases.push(table.lease(step));
    RowNumber row = 0;
    Outcome outcome{};
    table.map({&step, 1}, {&row, 1}, {&outcome, 1}, {.insert = true, .lease = &leases.back()});
    if (leases.size() > 4) leases.pop();
  }
  is_done = true;
  reader.join();
  EXPECT_TRUE(always_a_prefix);
}

TEST_F(ThreadsTest, UpdatesSideBySideLoseNothing) {
  TableConfig zeros = config(4);
  zeros.optimizer = OptimizerConfig::sgd(1.0F);
  zeros.initializer = InitializerConfig::constant(0.0F);
  Table table(zeros);
  const Keys keys = range(0, 300);
  Floats values(keys.size() * 4);
  table.find_or_insert(keys, values.data());

  constexpr int kUpdates = 3000;
  std::atomic<int> num_ready{0};
  const Floats ones(keys.size() * 4, 1.0F);
  const auto update = [&] {
    for (++num_ready; num_ready < 2;) std::this_thread::yield();
    for (int i = 0; i < kUpdates; ++i) table.apply_gradients(keys, ones.data());
  };
  std::thread other(update);
  update();
  other.join();
  table.lookup(keys, values.data());
  EXPECT_EQ(values, Floats(values.size(), -2.0F * kUpdates));
  EXPECT_EQ(table.update_count(), 2U * kUpdates);
}

TEST_F(ThreadsTest, LeasesEndOnAnyThread) {
  Table table(config(2));
  std::vector<Lease> leases;
  for (std::int64_t step = 0; step < 32; ++step) {
    Mapped batch = map_batch(table, step, 100);
    leases.push_back(std::move(batch.lease));
  }
  EXPECT_EQ(table.size(), 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&leases, t] {
      for (std::size_t i = t; i < leases.size(); i += 4) leases[i].release();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(table.size(), 0);
  EXPECT_EQ(table.stats().num_rows_in_flight, 0);
  table.check_invariants();
}

TEST_F(ThreadsTest, ManyTablesAtOnceEqualOneByOne) {
  constexpr std::size_t kTables = 5;
  std::vector<Table> together;
  std::vector<Table> apart;
  for (std::size_t t = 0; t < kTables; ++t) {
    together.emplace_back(config(4));
    apart.emplace_back(config(4));
  }
  std::vector<Keys> keys;
  std::vector<std::vector<RowNumber>> rows(kTables);
  std::vector<std::vector<Outcome>> outcomes(kTables);
  std::vector<MapCall> calls;
  for (std::size_t t = 0; t < kTables; ++t)
    keys.push_back(batch_keys(static_cast<std::int64_t>(t), 3000));
  for (std::size_t t = 0; t < kTables; ++t) {
    rows[t].resize(keys[t].size());
    outcomes[t].resize(keys[t].size());
    calls.push_back({&together[t], keys[t], rows[t], outcomes[t], {.insert = true}});
  }
  set_num_threads(3);
  map_tables(calls);
  for (std::size_t t = 0; t < kTables; ++t) {
    std::vector<RowNumber> row(keys[t].size());
    std::vector<Outcome> outcome(keys[t].size());
    apart[t].map(keys[t], row, outcome, {.insert = true});
    EXPECT_EQ(rows[t], row);
    EXPECT_EQ(outcomes[t], outcome);
    EXPECT_TRUE(export_all(together[t]) == export_all(apart[t]));
  }
}

TEST_F(ThreadsTest, TheNumberOfThreadsMayChangeBesideCalls) {
  Table table(config(2));
  std::atomic<bool> is_done{false};
  std::thread changer([&] {
    for (int count = 1; !is_done; count = count % 4 + 1) set_num_threads(count);
  });
  for (std::int64_t step = 0; step < 10; ++step) {
    Mapped batch = map_batch(table, step, 20'000);
    train_batch(table, batch);
  }
  is_done = true;
  changer.join();
  table.check_invariants();
}

TEST_F(ThreadsTest, ManyThreadsShareThePool) {
  set_num_threads(3);
  std::vector<Exported> results(6);
  std::vector<std::thread> threads;
  for (Exported& result : results) {
    threads.emplace_back([&result] {
      Table table(config(2));
      for (std::int64_t step = 0; step < 4; ++step) {
        Mapped batch = map_batch(table, step, 20'000);
        train_batch(table, batch);
      }
      result = export_all(table);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Exported& result : results) EXPECT_TRUE(result == results[0]);
}

}  // namespace
}  // namespace recsdk::test::threads_test
