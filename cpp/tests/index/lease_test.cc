// Batches in flight: what readers see, and when rows are given to other keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "recsdk/recsdk.h"

namespace recsdk::lease_test {
namespace {

TableConfig config_of(std::int64_t dim) {
  TableConfig config;
  config.dim = dim;
  config.name = "items";
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  return config;
}

struct Mapped {
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

Mapped map(Table& table, const std::vector<Key>& keys, bool insert, const Lease* lease = nullptr) {
  Mapped mapped{std::vector<RowNumber>(keys.size()), std::vector<Outcome>(keys.size())};
  table.map(keys, mapped.rows, mapped.outcomes, {insert, lease});
  return mapped;
}

std::vector<Outcome> lookup_outcomes(const Table& table, const std::vector<Key>& keys) {
  std::vector<float> values(keys.size() * static_cast<std::size_t>(table.config().dim));
  std::vector<Outcome> outcomes(keys.size());
  table.lookup(keys, values.data(), outcomes);
  return outcomes;
}

std::vector<Key> exported_keys(const Table& table) {
  std::vector<Key> keys(1000);
  RowNumber begin = 0;
  const std::int64_t n = table.export_rows(begin, {1000, keys.data(), nullptr, nullptr});
  keys.resize(static_cast<std::size_t>(n));
  return keys;
}

using Outcomes = std::vector<Outcome>;
constexpr Outcome kFound = Outcome::kFound;
constexpr Outcome kInserted = Outcome::kInserted;
constexpr Outcome kMissing = Outcome::kMissing;
constexpr Outcome kRefused = Outcome::kRefused;

TEST(Lease, InsertionsShowWhenTheBatchIsReleased) {
  Table table(config_of(4));
  map(table, {1, 2}, true);
  Lease lease = table.lease(7);
  EXPECT_EQ(map(table, {2, 3, 3}, true, &lease).outcomes, (Outcomes{kFound, kInserted, kFound}));
  EXPECT_EQ(lookup_outcomes(table, {1, 2, 3}), (Outcomes{kFound, kFound, kMissing}));
  EXPECT_EQ(map(table, {3}, false).outcomes, (Outcomes{kMissing}));
  EXPECT_EQ(table.size(), 2);
  EXPECT_EQ(exported_keys(table), (std::vector<Key>{1, 2}));
  EXPECT_EQ(table.stats().num_rows_in_flight, 1);
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(kInserted)], 2U);
  table.check_invariants();
  lease.release();
  EXPECT_EQ(lookup_outcomes(table, {1, 2, 3}), (Outcomes{kFound, kFound, kFound}));
  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(exported_keys(table), (std::vector<Key>{1, 2, 3}));
  EXPECT_EQ(table.stats().num_rows_in_flight, 0);
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(kInserted)], 3U);
}

TEST(Lease, LaterBatchesSeeEarlierOnesAndBecomeVisibleInOrder) {
  Table table(config_of(4));
  Lease first = table.lease(1);
  Lease second = table.lease(2);
  map(table, {10}, true, &first);
  EXPECT_EQ(map(table, {10, 11}, true, &second).outcomes, (Outcomes{kFound, kInserted}));
  second.release();
  EXPECT_EQ(table.size(), 0) << "step 1 is still in flight";
  first.release();
  EXPECT_EQ(table.size(), 2);
}

TEST(Lease, LetsGoWhenDestroyedMovedOrReassigned) {
  Table table(config_of(4));
  {
    Lease lease = table.lease(1);
    map(table, {1}, true, &lease);
    Lease moved = std::move(lease);
    EXPECT_EQ(moved.step(), std::optional<std::int64_t>(1));
    EXPECT_EQ(table.size(), 0);
  }
  EXPECT_EQ(table.size(), 1);
  Lease lease = table.lease(2);
  map(table, {2}, true, &lease);
  lease = table.lease(3);
  EXPECT_EQ(table.size(), 2);
}

TEST(Lease, StepsAscend) {
  Table table(config_of(4));
  const Lease lease = table.lease(5);
  EXPECT_THROW(table.lease(4), std::invalid_argument);
  EXPECT_NO_THROW(table.lease(5));
  EXPECT_NO_THROW(table.lease());
}

TEST(Lease, OutOfOrderWritersAreTurnedAwayWhileBatchesAreInFlight) {
  Table table(config_of(1));
  map(table, {1}, true);
  Lease lease = table.lease(1);
  const float value = 3.0F;
  const std::vector<Key> keys = {1};
  const auto expect_busy = [](const auto& call) {
    try {
      call();
      FAIL() << "expected Error(kBusy)";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBusy);
      EXPECT_NE(std::string(error.what()).find("steps 1 to 1"), std::string::npos) << error.what();
    }
  };
  expect_busy([&] { map(table, {2}, true); });
  expect_busy([&] { table.upsert(keys, &value); });
  expect_busy([&] { table.erase(keys); });
  expect_busy([&] { table.clear(); });
  EXPECT_EQ(lookup_outcomes(table, {1, 2}), (Outcomes{kFound, kMissing}));
  lease.release();
  EXPECT_NO_THROW(table.erase(keys));
}

TEST(Lease, KeepsErasedRowsFromOtherKeys) {
  Table table(config_of(2));
  const RowNumber row = map(table, {1}, true).rows[0];
  Lease reader = table.lease();
  const std::vector<Key> keys = {1};
  table.erase(keys);
  EXPECT_NE(map(table, {2}, true).rows[0], row) << "a batch may still read or update the old row";
  table.check_invariants();
  reader.release();
  EXPECT_EQ(map(table, {3}, true).rows[0], row);
  table.check_invariants();
}

TEST(Lease, RefusalsAreDecidedInStepOrder) {
  TableConfig config = config_of(2);
  config.max_rows = 2;
  Table table(config);
  Lease first = table.lease(1);
  Lease second = table.lease(2);
  EXPECT_EQ(map(table, {1, 2}, true, &first).outcomes, (Outcomes{kInserted, kInserted}));
  EXPECT_EQ(map(table, {3, 1, 3}, true, &second).outcomes, (Outcomes{kRefused, kFound, kRefused}));
}

TEST(Lease, OfAnotherTableOrReleasedIsACallersMistake) {
  Table table(config_of(2));
  Table other(config_of(2));
  Lease lease = other.lease(1);
  EXPECT_THROW(map(table, {1}, true, &lease), std::invalid_argument);
  lease.release();
  EXPECT_THROW(map(other, {1}, true, &lease), std::invalid_argument);
  EXPECT_EQ(table.size() + other.size(), 0);
}

TEST(Lease, OutlivesItsTable) {
  Lease lease;
  {
    Table table(config_of(2));
    lease = table.lease(1);
    map(table, {1}, true, &lease);
  }
  lease.release();
  EXPECT_TRUE(lease.is_released());
}

TEST(Lease, CountsAllOutcomesOfABatchWhenItBecomesVisible) {
  Table table(config_of(2));
  Lease lease = table.lease(1);
  map(table, {1}, false, &lease);
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(kMissing)], 0U);
  lease.release();
  EXPECT_EQ(table.stats().outcomes[static_cast<int>(kMissing)], 1U);
}

TEST(Lease, MayEndWithinACustomInitializer) {
  std::vector<Lease> leases;
  TableConfig config = config_of(2);
  config.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
    leases.clear();
    std::fill_n(values, keys.size() * 2, 1.0F);
  });
  Table table(config);
  leases.push_back(table.lease());
  EXPECT_EQ(map(table, {1, 2}, true).outcomes, (Outcomes{kInserted, kInserted}));
  Lease own = table.lease(1);
  config.initializer =
      InitializerConfig::custom([&](std::span<const Key>, float*) { own.release(); });
  Table releasing(config);
  own = releasing.lease(1);
  EXPECT_THROW(map(releasing, {1}, true, &own), std::invalid_argument);
  EXPECT_EQ(releasing.size(), 0);
  EXPECT_EQ(releasing.stats().num_rows_in_flight, 0);
  releasing.check_invariants();
}

/// A table whose initializer waits with key 9, and so holds the table until it is told.
struct HeldTable {
  static TableConfig config(HeldTable& held) {
    TableConfig config = config_of(2);
    config.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
      std::fill_n(values, keys.size() * 2, 1.0F);
      if (keys[0] != 9) return;
      held.is_held.count_down();
      held.goes_on.wait();
    });
    return config;
  }

  std::latch is_held{1};
  std::latch goes_on{1};
  Table table{config(*this)};
};

// Whoever releases goes on at once; whoever looks next sees the batch.
TEST(Lease, IsReleasedWhileAnotherCallHoldsTheTable) {
  HeldTable held;
  Table& table = held.table;
  std::vector<Lease> leases(3);
  for (std::int64_t step = 0; step < 3; ++step) {
    Lease& lease = leases[static_cast<std::size_t>(step)] = table.lease(step);
    map(table, {step + 1}, true, &lease);
  }
  Lease last = table.lease(3);
  std::thread mapper([&] { map(table, {9}, true, &last); });
  held.is_held.wait();
  leases[1].release();
  EXPECT_TRUE(leases[1].is_released());
  leases.erase(leases.begin());  // nobody has the first one any more
  held.goes_on.count_down();
  EXPECT_EQ(map(table, {1, 2, 3, 9}, false).outcomes,
            (Outcomes{kFound, kFound, kMissing, kMissing}));
  mapper.join();
  EXPECT_EQ(table.stats().num_rows_in_flight, 2);
  EXPECT_EQ(table.stats().num_rows_held_back, 0);
  leases.clear();
  last.release();
  EXPECT_EQ(table.stats().num_rows_in_flight, 0);
  table.check_invariants();
}

TEST(Lease, LetsGoOfErasedRowsThoughAnotherCallHeldTheTable) {
  HeldTable held;
  Table& table = held.table;
  const RowNumber row = map(table, {1}, true).rows[0];
  Lease reader = table.lease();
  const std::vector<Key> keys = {1};
  table.erase(keys);
  std::thread mapper([&] { map(table, {9}, true); });
  held.is_held.wait();
  reader.release();
  held.goes_on.count_down();
  EXPECT_EQ(map(table, {3}, true).rows[0], row);
  mapper.join();
  table.check_invariants();
}

// The callback of a lookup runs while others look up too.
TEST(Lease, MayEndWithinALookupThoughSomebodyReadsWhatLeaves) {
  Lease lease;
  TableConfig config = config_of(2);
  config.default_row.kind = DefaultKind::kInitialRow;
  config.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
    std::fill_n(values, keys.size() * 2, 1.0F);
    if (keys[0] == 9) lease.release();
  });
  Table table(config);
  map(table, {1}, true);
  const Leavers leavers = table.leavers({});
  lease = table.lease();
  const std::vector<Key> keys = {1};
  table.erase(keys);
  EXPECT_EQ(leavers.size(), 0);
  EXPECT_EQ(lookup_outcomes(table, {9}), Outcomes{kMissing});
  EXPECT_TRUE(lease.is_released());
  table.check_invariants();
  EXPECT_EQ(leavers.size(), 1);
}

// Whoever knows that a lease is released finds its batch ended.
TEST(Lease, IsReleasedByTwoThreads) {
  constexpr std::int64_t kSteps = 20'000;
  Table table(config_of(2));
  const std::vector<Key> keys = {1};
  Lease lease;
  std::atomic<std::int64_t> begun{0};
  std::atomic<std::int64_t> num_done{0};
  const auto release = [&](bool takes) {
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      if (takes) {
        lease = table.lease(step);
        begun = step;
      }
      while (begun < step) std::this_thread::yield();
      lease.release();
      EXPECT_NO_THROW(table.erase(keys));
      ++num_done;
      while (num_done < 2 * step) std::this_thread::yield();
    }
  };
  std::thread other(release, false);
  release(true);
  other.join();
}

TEST(Lease, ACustomInitializerMustNotCallItsTable) {
  TableConfig config = config_of(2);
  Table* itself = nullptr;
  config.initializer =
      InitializerConfig::custom([&](std::span<const Key>, float*) { itself->size(); });
  Table table(config);
  itself = &table;
  try {
    map(table, {1}, true);
    FAIL() << "expected Error(kBusy)";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBusy);
  }
  itself = nullptr;
  EXPECT_EQ(table.size(), 0);
  table.check_invariants();
}

// A background thread maps batches ahead while this one pools and updates: as in one thread.
TEST(Lease, MappingAheadOnAnotherThreadChangesNoResult) {
  const auto run = [](bool ahead) {
    Table table(config_of(8));
    constexpr int kSteps = 60;
    std::vector<Mapped> mapped(kSteps);
    std::vector<Lease> leases(kSteps);
    const auto map_step = [&](int step) {
      std::vector<Key> keys;
      for (int i = 0; i < 500; ++i) keys.push_back((step * 37 + i * i) % 4001 - 2000);
      leases[static_cast<std::size_t>(step)] = table.lease(step);
      mapped[static_cast<std::size_t>(step)] =
          map(table, keys, true, &leases[static_cast<std::size_t>(step)]);
    };
    const auto train_step = [&](int step) {
      Mapped& m = mapped[static_cast<std::size_t>(step)];
      const Bags bags{m.rows, m.outcomes, {}, {}, Pooling::kSum};
      std::vector<float> out(m.rows.size() * 8);
      const PoolBlock pooled{bags, out.data(), 8};
      table.pool({&pooled, 1});
      const GradBlock gradient{bags, out.data(), 8, nullptr};
      table.update({&gradient, 1});
      leases[static_cast<std::size_t>(step)].release();
    };
    constexpr int kDepth = 6;
    for (int first = 0; first < kSteps; first += kDepth) {
      if (!ahead) {
        for (int s = first; s < first + kDepth; ++s) {
          map_step(s);
          train_step(s);
        }
        continue;
      }
      if (first == 0) {
        for (int s = 0; s < kDepth; ++s) map_step(s);
      }
      std::thread mapper([&] {
        for (int s = first + kDepth; s < std::min(first + 2 * kDepth, kSteps); ++s) map_step(s);
      });
      for (int s = first; s < first + kDepth; ++s) train_step(s);
      mapper.join();
    }
    std::vector<float> weights(4001 * 8);
    std::vector<Key> keys(4001);
    RowNumber begin = 0;
    const std::int64_t n = table.export_rows(begin, {4001, keys.data(), weights.data(), nullptr});
    weights.resize(static_cast<std::size_t>(n) * 8);
    keys.resize(static_cast<std::size_t>(n));
    return std::pair(keys, weights);
  };
  const auto plain = run(false);
  EXPECT_GT(plain.first.size(), 500U);
  EXPECT_EQ(plain, run(true));
}

}  // namespace
}  // namespace recsdk::lease_test
