// Every allocation of every call fails once: the table is as it was, and the same call then
// succeeds.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "failing_allocations.h"
#include "failing_operator_new.h"
#include "recsdk/recsdk.h"
#include "util/hash.h"
#include "util/memory.h"

namespace recsdk::test::allocation_failure_test {
namespace {

using Keys = std::vector<Key>;

Keys range(Key first, std::size_t count) {
  Keys keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config() {
  TableConfig config;
  config.dim = 3;
  config.hash_seed = 5;
  config.optimizer = OptimizerConfig::adagrad();
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  return config;
}

/// A table in the middle of its life, and the batch that a call belongs to.
struct Subject {
  explicit Subject(const TableConfig& config) : table(config) {}
  Table table;
  Lease lease;
  std::vector<RowNumber> rows = std::vector<RowNumber>(10000);
  std::vector<Outcome> outcomes = std::vector<Outcome>(10000);
  std::vector<float> values = std::vector<float>(15000);

  void map(std::span<const Key> keys, const Lease* of = nullptr) {
    table.map(keys, std::span(rows).first(keys.size()), std::span(outcomes).first(keys.size()),
              {.insert = true, .lease = of});
  }
};
using Prepare = std::function<void(Subject&)>;

class AllocationFailureTest : public testing::Test {
 protected:
  AllocationFailureTest() { internal::set_page_allocation_hook(fail_pages); }
  ~AllocationFailureTest() override {
    internal::set_page_allocation_hook(nullptr);
    set_num_threads(threads_before_);
  }

  std::unique_ptr<Subject> make(const Prepare& prepare) const {
    auto subject = std::make_unique<Subject>(config_);
    prepare(*subject);
    set_num_threads(3);  // a new pool: making it is part of the call
    return subject;
  }

  /// call(subject) with each of its allocations failing once. `is_met`: at least one must have
  /// stopped it.
  void fail_each(const Prepare& prepare, const Prepare& call, bool is_met = true) {
    bool was_met = false;
    for (std::int64_t n = 0;; ++n) {
      SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
      const auto subject = make(prepare);
      const auto twin = make(prepare);
      const Snapshot before(subject->table);
      const Ending ending = run_failing(n, [&] { call(*subject); });
      ASSERT_NO_THROW(subject->table.check_invariants());
      if (ending == Ending::kOutOfMemory) {
        was_met = true;
        ASSERT_TRUE(Snapshot(subject->table) == before);
        ASSERT_NO_THROW(call(*subject));
      }
      call(*twin);
      expect_equal(*subject, *twin);
      if (ending == Ending::kUndisturbed) break;
    }
    EXPECT_EQ(was_met, is_met);
  }

  static void expect_equal(Subject& subject, Subject& twin) {
    subject.lease.release();
    twin.lease.release();
    ASSERT_TRUE(Snapshot(subject.table) == Snapshot(twin.table));
    EXPECT_EQ(subject.rows, twin.rows);
    EXPECT_EQ(subject.outcomes, twin.outcomes);
    EXPECT_EQ(subject.values, twin.values);
  }

  int threads_before_ = num_threads();
  TableConfig config_ = config();
};

const Prepare kNothing = [](Subject&) {};

// Keys in use, free rows, and rows that a batch holds back.
const Prepare kLived = [](Subject& s) {
  s.map(range(0, 900));
  s.table.erase(range(100, 50));
  s.lease = s.table.lease();
  s.table.erase(range(300, 70));
  s.table.apply_gradients(range(0, 200), s.values.data());
};

TEST_F(AllocationFailureTest, Making) {
  for (std::int64_t n = 0;; ++n) {
    std::optional<Table> table;
    const TableConfig given = config();
    const Ending ending = run_failing(n, [&] { table.emplace(given); });
    EXPECT_EQ(table.has_value(), ending != Ending::kOutOfMemory);
    if (ending == Ending::kUndisturbed) break;
  }
}

TEST_F(AllocationFailureTest, InsertingIntoAnEmptyTable) {
  fail_each(kNothing, [](Subject& s) { s.map(range(-2000, 4000)); });
}

// More than a piece of the batch: what comes then is known by its first.
TEST_F(AllocationFailureTest, InsertingManyIntoAnEmptyTable) {
  fail_each(kNothing, [](Subject& s) {
    Keys keys(9000);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<Key>(internal::mix64(i));
    s.map(keys);
  });
}

TEST_F(AllocationFailureTest, GrowingALivedInTable) {
  fail_each(kLived, [](Subject& s) { s.map(range(200, 4000)); });
}

TEST_F(AllocationFailureTest, InsertingBesideALimit) {
  config_.max_rows = 1000;
  fail_each(kLived, [](Subject& s) { s.map(range(200, 4000)); });
}

TEST_F(AllocationFailureTest, EvictingForOthers) {
  config_.max_rows = 1000;
  config_.eviction_groups = 4;
  config_.eviction = EvictConfig{.order = EvictOrder::kLfu, .churn_steps = 5};
  fail_each(kLived, [](Subject& s) { s.map(range(500, 900)); });
  fail_each(kLived, [](Subject& s) { s.map(range(200, 2000)); });  // too many: some are refused
  fail_each(kLived, [](Subject& s) { s.table.evict(300); });
}

// Rows are measured, of which few have changed or most, and filed anew.
TEST_F(AllocationFailureTest, LookingAtRows) {
  config_.max_rows = 1000;
  config_.eviction_groups = 4;
  const auto by_count = [](const EvictColumns& columns, std::span<double> places) {
    std::copy(columns.counts.begin(), columns.counts.end(), places.begin());
  };
  const std::array rules = {EvictConfig{.order = EvictOrder::kLowNorm, .expire_every = 1},
                            EvictConfig{.order = EvictOrder::kFunction,
                                        .expire_every = 1,
                                        .function = by_count,
                                        .keeps_counts = true,
                                        .ignores_now = true},
                            EvictConfig{.order = EvictOrder::kFunction,
                                        .expire_every = 1,
                                        .function = by_count,
                                        .keeps_counts = true}};
  const std::vector<float> gradients(3 * 900, 0.5F);
  for (const EvictConfig& rule : rules) {
    config_.eviction = rule;
    for (const std::size_t num_changed : {std::size_t{60}, std::size_t{700}}) {
      const auto prepare = [&](Subject& s) {
        s.map(range(0, 900));
        s.map(range(880, 120));
        s.map({});
        s.map(range(0, num_changed));
        s.table.apply_gradients(range(0, num_changed), gradients.data());
      };
      fail_each(prepare, [](Subject& s) { s.map(range(900, 350)); });
    }
  }
}

// Scores are others at each call, so kinds of rows come, and those that no row has are given to
// others; readers of the batch in flight go by those from before.
TEST_F(AllocationFailureTest, LookingAtKindsOfRowsForABatchInFlight) {
  config_.max_rows = 1000;
  config_.eviction_groups = 4;
  config_.eviction = EvictConfig{.order = EvictOrder::kFunction,
                                 .expire_every = 1,
                                 .function =
                                     [](const EvictColumns& columns, std::span<double> places) {
                                       const double sign = columns.now % 2 == 0 ? 1.0 : -1.0;
                                       for (std::size_t i = 0; i < places.size(); ++i)
                                         places[i] = sign * static_cast<double>(columns.scores[i]);
                                     },
                                 .keeps_scores = true};
  const auto map = [](Subject& s, Key first, const Lease* lease) {
    const Keys keys = range(first, 450);
    std::vector<float> scores(keys.size());
    std::iota(scores.begin(), scores.end(), static_cast<float>(first * first));
    MapOptions options{.insert = true, .lease = lease};
    options.data.scores = scores;
    s.table.map(keys, std::span(s.rows).first(keys.size()),
                std::span(s.outcomes).first(keys.size()), options);
  };
  for (const int num_calls : {2, 4, 5}) {
    const auto prepare = [&](Subject& s) {
      for (int n = 0; n < num_calls; ++n) map(s, 200 * n, nullptr);
      s.lease = s.table.lease(9);
    };
    fail_each(prepare, [&](Subject& s) { map(s, 200 * num_calls, &s.lease); });
  }
}

TEST_F(AllocationFailureTest, EvictingForABatchInFlight) {
  config_.max_rows = 1000;
  config_.eviction_groups = 4;
  config_.eviction = EvictConfig{.churn_steps = 5};
  const auto prepare = [](Subject& s) {
    s.map(range(0, 900));
    s.lease = s.table.lease(4);
    s.map(range(600, 700), &s.lease);
  };
  fail_each(prepare, [](Subject& s) { s.map(range(1200, 500), &s.lease); });
}

// Most keys come once and get a record, some twice and get a row; records leave for others.
TEST_F(AllocationFailureTest, KeepingKeysOut) {
  config_.admission =
      AdmitConfig{.rule = {{.kind = AdmitTerm::Kind::kCount, .count = 2}}, .max_records = 1500};
  const auto prepare = [](Subject& s) {
    s.map(range(0, 900));
    s.map(range(0, 200));
    s.map(range(900, 500));
    s.lease = s.table.lease(9);
  };
  fail_each(prepare, [](Subject& s) { s.map(range(150, 2000), &s.lease); });
}

// Calls of one step, and batches in flight, keep what they changed of the sketch.
TEST_F(AllocationFailureTest, CountingInASketch) {
  config_.admission = AdmitConfig{.rule = {{.kind = AdmitTerm::Kind::kCountSketch, .count = 2}},
                                  .max_bytes = kFewestSketchBytes};
  const auto prepare = [](Subject& s) {
    s.map(range(0, 2900));
    s.lease = s.table.lease(9);
    s.map(range(2000, 500), &s.lease);
  };
  fail_each(prepare, [](Subject& s) { s.map(range(1500, 2000), &s.lease); });
}

TEST_F(AllocationFailureTest, FindingOrInserting) {
  fail_each(kLived, [](Subject& s) {
    const Keys keys = range(500, 2500);
    s.table.find_or_insert(keys, s.values.data(), std::span(s.outcomes).first(keys.size()));
  });
}

TEST_F(AllocationFailureTest, PoolingKeys) {
  const auto pool = [](Subject& s) {
    const Keys keys = range(500, 9000);
    std::vector<float> pooled(keys.size() * 3);
    s.table.pool_keys({keys, {}, {}, Pooling::kSum}, pooled.data(), 3);
  };
  fail_each(kLived, pool);
}

TEST_F(AllocationFailureTest, CustomInitializers) {
  config_.initializer = InitializerConfig::custom([](std::span<const Key> keys, float* values) {
    const std::vector<Key> copy(keys.begin(), keys.end());  // an allocation of the callback
    for (const Key key : copy) {
      for (int c = 0; c < 3; ++c) *values++ = static_cast<float>(key);
    }
  });
  fail_each(kLived, [](Subject& s) { s.map(range(200, 2000)); });
}

TEST_F(AllocationFailureTest, InsertingForABatchInFlight) {
  fail_each(
      [](Subject& s) {
        s.lease = s.table.lease(4);
        s.map(range(0, 600), &s.lease);
      },
      [](Subject& s) { s.map(range(300, 3000), &s.lease); });
}

TEST_F(AllocationFailureTest, TakingALease) {
  fail_each(kLived, [](Subject& s) { s.lease = s.table.lease(7); });
}

TEST_F(AllocationFailureTest, Upserting) {
  fail_each(kLived, [](Subject& s) {
    const std::vector<float> state(3 * 2500, 2.0F);
    const std::vector<float> values(3 * 2500, 1.0F);
    s.table.upsert(range(500, 2500), values.data(), state.data());
  });
}

TEST_F(AllocationFailureTest, ErasingAndClearing) {
  fail_each(kLived, [](Subject& s) { s.table.erase(range(-50, 700)); });
  fail_each(kLived, [](Subject& s) { s.table.clear(); });
}

TEST_F(AllocationFailureTest, Reserving) {
  fail_each(kLived, [](Subject& s) { s.table.reserve(2'000'000); });
}

TEST_F(AllocationFailureTest, OnlyRowsThatATableHasRoomForAreCounted) {
  Table table(config_);
  table.index().reserve(1000);
  EXPECT_EQ(table.stats().row_bytes, 0);
  table.reserve(1000);
  EXPECT_EQ(table.stats().row_bytes, 1000 * table.layout().row_bytes());
}

// Memory that is backed ahead and is not there would end the process.
TEST_F(AllocationFailureTest, ReservingMoreThanThereIsTakesNoPage) {
  constexpr std::int64_t kRows = 4'000'000'000;
  const std::optional<std::uint64_t> available = internal::available_memory();
  if (!available || *available > 30 * static_cast<std::uint64_t>(kRows))
    GTEST_SKIP() << "there is memory for so many rows, or nobody knows";
  Index index({.name = "large"});
  internal::set_page_allocation_hook(
      [](std::size_t) { throw std::logic_error("a page was asked for"); });
  try {
    index.reserve(kRows);
    ADD_FAILURE() << "there cannot be so much memory";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

TEST_F(AllocationFailureTest, LookingUp) {
  fail_each(kLived, [](Subject& s) { s.table.lookup(range(0, 2000), s.values.data()); });
}

TEST_F(AllocationFailureTest, ApplyingGradients) {
  const std::vector<float> gradients(3 * 2000, 0.5F);
  fail_each(kLived, [&](Subject& s) { s.table.apply_gradients(range(0, 2000), gradients.data()); });
}

TEST_F(AllocationFailureTest, PoolingNeverNeedsMemory) {
  const auto prepare = [](Subject& s) { s.map(range(0, 2000)); };
  const auto call = [](Subject& s) {
    PoolBlock block{.bags = {}, .out = s.values.data(), .stride = 3};
    block.bags.rows = std::span(s.rows).first(2000);
    block.bags.outcomes = std::span(s.outcomes).first(2000);
    s.table.pool({&block, 1});
  };
  fail_each(prepare, call, false);
}

TEST_F(AllocationFailureTest, Updating) {
  const std::vector<float> gradient(3, 0.5F);
  fail_each([](Subject& s) { s.map(range(0, 2000)); },
            [&](Subject& s) {
              GradBlock block{
                  .bags = {}, .grad = gradient.data(), .stride = 0, .weights_grad = nullptr};
              block.bags.rows = std::span(s.rows).first(2000);
              block.bags.outcomes = std::span(s.outcomes).first(2000);
              s.table.update({&block, 1});
            });
}

// Own rows and shared ones, of which some exceed the limit.
TEST_F(AllocationFailureTest, LimitingNorms) {
  config_.max_rows = 500;
  config_.eviction_groups = 1;
  config_.default_row = {.kind = DefaultKind::kSharedRows, .num_rows = 8};
  fail_each([](Subject& s) { s.map(range(0, 900)); },
            [](Subject& s) {
              s.table.limit_norms(std::span(s.rows).first(900), std::span(s.outcomes).first(900),
                                  {.max_norm = 0.75});
            });
}

// A part of a call over many tables is done whole, or not at all.
TEST_F(AllocationFailureTest, MappingManyTables) {
  const Keys keys = range(200, 2500);
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    const std::array subjects = {make(kLived), make(kLived), make(kLived)};
    const auto twin = make(kLived);
    const Snapshot before(twin->table);
    twin->map(keys);
    const Snapshot after(twin->table);

    std::vector<MapCall> calls;
    for (const auto& s : subjects) {
      calls.push_back({.table = &s->table,
                       .keys = keys,
                       .rows = std::span(s->rows).first(keys.size()),
                       .outcomes = std::span(s->outcomes).first(keys.size()),
                       .options = {.insert = true}});
    }
    const Ending ending = run_failing(n, [&] { map_tables(calls); });
    for (const auto& s : subjects) {
      ASSERT_NO_THROW(s->table.check_invariants());
      const Snapshot now(s->table);
      ASSERT_TRUE(now == after || (ending == Ending::kOutOfMemory && now == before));
    }
    ASSERT_NO_THROW(map_tables(calls));
    for (const auto& s : subjects) ASSERT_TRUE(Snapshot(s->table).has_rows_of(after));
    if (ending == Ending::kUndisturbed) break;
  }
}

}  // namespace
}  // namespace recsdk::test::allocation_failure_test
