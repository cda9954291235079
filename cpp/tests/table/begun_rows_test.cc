// Rows that a restore brings, in tables whose new rows begin with shared ones.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernel_support.h"
#include "recsdk/recsdk.h"
#include "table/table_impl.h"

namespace recsdk::test::begun_rows_test {
namespace {

constexpr std::int64_t kDim = 5;

TableConfig begun_config() {
  TableConfig config;
  config.dim = kDim;
  config.default_row = {DefaultKind::kSharedRows, 0.0F, 4, BeginWith::kSharedRow};
  return config;
}

std::vector<Key> keys_from(Key first, std::int64_t count) {
  std::vector<Key> keys(static_cast<std::size_t>(count));
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

std::vector<float> values_of(std::span<const Key> keys, std::uint32_t seed) {
  return random_floats(keys.size() * kDim, seed, -1.0F, 1.0F);
}

std::vector<float> looked_up(const Table& table, std::span<const Key> keys) {
  std::vector<float> values(keys.size() * kDim);
  table.lookup(keys, values.data());
  return values;
}

void add(Restore& restore, std::span<const Key> keys, const std::vector<float>& values) {
  const std::array<const void*, 1> fields = {values.data()};
  RestoreOptions options;
  options.drop_state = true;
  restore.add_rows(keys, fields, options);
}

void expect_written(Table& table, std::span<const Key> keys) {
  table.check_invariants();
  const std::vector<float> values = values_of(keys, 7);
  table.upsert(keys, values.data());
  EXPECT_TRUE(bits_equal(looked_up(table, keys), values));
  table.check_invariants();
}

/// Numbers of rows before a restore and of those that it brings: none, and fewer and more than a
/// word has bits and than a page has.
constexpr std::array<std::int64_t, 4> kSizes = {0, 5, 200, 40'000};

TEST(BegunRows, WhatARestoreBringsIsWrittenBeforeAKeyIsNew) {
  for (const std::int64_t num_before : kSizes) {
    for (const std::int64_t num_brought : kSizes) {
      Table table(begun_config());
      const std::vector<Key> before = keys_from(-3, num_before);
      table.upsert(before, values_of(before, 1).data());
      const std::vector<Key> keys = keys_from(0, num_brought);
      for (int again = 0; again < 2; ++again) {
        Restore restore(table);
        add(restore, keys, values_of(keys, 2));
        restore.commit(0);
        expect_written(table, keys);
      }
    }
  }
}

TEST(BegunRows, AFailedRestoreLeavesRowsThatAreWritten) {
  Table table(begun_config());
  const std::vector<Key> keys = keys_from(0, 70);
  const std::vector<float> values = values_of(keys, 1);
  {
    Restore restore(table);
    add(restore, keys, values);
    EXPECT_THROW(add(restore, keys, values), Error);  // they come twice
    EXPECT_THROW(restore.commit(0), std::invalid_argument);
  }
  EXPECT_EQ(table.size(), 0);
  expect_written(table, keys);
}

TEST(BegunRows, WhatARestoreBringsIsErasedClearedAndWrittenAgain) {
  Table table(begun_config());
  const std::vector<Key> keys = keys_from(0, 300);
  for (const bool clears : {false, true}) {
    Restore restore(table);
    add(restore, keys, values_of(keys, 1));
    restore.commit(0);
    if (clears) {
      table.clear();
    } else {
      table.erase(std::span(keys).first(200));
    }
    expect_written(table, std::span(keys).last(100));
    expect_written(table, keys);
  }
}

TEST(BegunRows, RowsThatWaitAreReadBesideThoseThatARestoreBrought) {
  Table table(begun_config());
  const std::vector<Key> old = keys_from(0, 300);
  const std::vector<float> values = values_of(old, 1);
  {
    Restore restore(table);
    add(restore, old, values);
    restore.commit(0);
  }
  table.erase(std::span(old).first(1));  // its row comes to another key
  std::vector<Key> keys = keys_from(1, 300);
  std::vector<float> wanted = looked_up(table, keys);
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  std::vector<float> read(wanted.size());
  {
    Lease lease = table.lease(0);
    table.map(keys, rows, outcomes, {true, &lease});
    const PoolBlock block{{rows, outcomes, {}, {}, Pooling::kSum}, read.data(), kDim};
    table.pool({&block, 1});
  }
  EXPECT_TRUE(bits_equal(read, wanted));
  expect_written(table, keys);
}

// They do not begin when that call ends, after which shared rows may have been trained.
TEST(BegunRows, RowsOfAnAbandonedBatchBeginThoughAnotherCallHoldsTheTable) {
  Table table(begun_config());
  const std::vector<Key> keys = keys_from(0, 40);
  const std::vector<float> first = looked_up(table, keys);
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  table.map(keys, rows, outcomes);
  const Bags shared{rows, outcomes, {}, {}, Pooling::kSum};
  Lease lease = table.lease(0);
  std::vector<RowNumber> new_rows(keys.size());
  std::vector<Outcome> inserted(keys.size());
  table.map(keys, new_rows, inserted, {true, &lease});
  internal::FairMutex& mutex = TableAccess::impl(table).index.mutex;
  std::atomic<bool> is_done{false};
  std::thread releasing;
  {
    const std::unique_lock held(mutex);
    releasing = std::thread([&] {
      lease.release();
      is_done = true;
    });
    while (!is_done && !mutex.is_awaited()) std::this_thread::yield();
  }
  releasing.join();
  const std::vector<float> gradients(keys.size() * kDim, 1.0F);
  const GradBlock trained{shared, gradients.data(), kDim, nullptr};
  table.update({&trained, 1});
  EXPECT_TRUE(bits_equal(looked_up(table, keys), first));
  EXPECT_FALSE(bits_equal(looked_up(table, keys_from(50, 40)), first));
}

}  // namespace
}  // namespace recsdk::test::begun_rows_test
