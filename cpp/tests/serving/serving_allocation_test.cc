// Every allocation of every call of the C interface of serving fails once: the call says so and has
// changed nothing, and the same call then succeeds.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "failing_allocations.h"
#include "failing_operator_new.h"
#include "fuzz/c_handle.h"
#include "recsdk/serving/c_api.h"
#include "support/frozen_tables.h"

namespace recsdk::test::serving_allocation_test {
namespace {

constexpr std::int64_t kDim = 3;
constexpr Key kNumKeys = 400;
constexpr std::int64_t kNumShared = 4;

using TableHandle = CHandle<recsdk_serving_table, recsdk_serving_close>;
using DeltaHandle = CHandle<recsdk_serving_delta, recsdk_serving_delta_destroy>;

std::vector<Key> range(Key first, std::size_t count) {
  std::vector<Key> keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

/// What a table answers.
struct Answers {
  explicit Answers(const recsdk_serving_table* table)
      : values(static_cast<std::size_t>(kNumKeys * kDim)), outcomes(kNumKeys) {
    const std::vector<Key> keys = range(0, kNumKeys);
    EXPECT_EQ(recsdk_serving_lookup(table, keys.data(), kNumKeys, values.data(), outcomes.data()),
              RECSDK_SERVING_OK);
    recsdk_serving_info info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(recsdk_serving_get_info(table, &info), RECSDK_SERVING_OK);
    num_rows = info.num_rows;
    num_deltas = info.num_deltas;
  }
  bool operator==(const Answers&) const = default;

  std::vector<float> values;
  std::vector<std::uint8_t> outcomes;
  std::int64_t num_rows = 0;
  std::int64_t num_deltas = 0;
};

/// Rows of some keys, while others leave, and shared rows if `has_shared`.
struct Changes {
  Changes(Key first, bool has_shared) : added(range(first, 60)), erased(range(first + 60, 40)) {
    rows.resize(added.size() * kDim);
    std::iota(rows.begin(), rows.end(), static_cast<float>(first));
    for (std::int64_t row = 0; has_shared && row < kNumShared; ++row)
      shared.push_back(shared_row_key(row, kNumShared));
    shared_rows.assign(shared.size() * kDim, -1.5F);
  }
  int add_to(const DeltaHandle& delta) const {
    return recsdk_serving_delta_add(delta.get(), added.data(), std::ssize(added), rows.data());
  }
  int erase_from(const DeltaHandle& delta) const {
    return recsdk_serving_delta_erase(delta.get(), erased.data(), std::ssize(erased));
  }
  int add_shared_to(const DeltaHandle& delta) const {
    return recsdk_serving_delta_add_shared(delta.get(), shared.data(), std::ssize(shared),
                                           shared_rows.data());
  }

  std::vector<Key> added;
  std::vector<float> rows;
  std::vector<Key> erased;
  std::vector<Key> shared;
  std::vector<float> shared_rows;
};

class ServingAllocationTest : public testing::Test {
 protected:
  ServingAllocationTest() {
    FreezeConfig config = config_of(folder_, kDim, FrozenDType::kFloat32);
    config.num_shards = 2;
    config.num_shared = kNumShared;
    Rows rows;
    for (Key key = 0; key < kNumKeys; key += 2)
      rows[key] = std::vector<float>(kDim, static_cast<float>(key));
    paths_ = freeze(rows, config);
    for (const std::string& path : paths_) files_.push_back(path.c_str());
  }

  int open(TableHandle& table) const {
    recsdk_serving_table* opened = nullptr;
    const int status = recsdk_serving_open(files_.data(), std::ssize(files_), &opened);
    EXPECT_EQ(opened != nullptr, status == RECSDK_SERVING_OK);
    table.owned.reset(opened);
    return status;
  }

  static int create(const TableHandle& table, DeltaHandle& delta) {
    recsdk_serving_delta* made = nullptr;
    const int status = recsdk_serving_delta_create(table.get(), &made);
    EXPECT_EQ(made != nullptr, status == RECSDK_SERVING_OK);
    delta.owned.reset(made);
    return status;
  }

  static DeltaHandle delta_of(const TableHandle& table, const Changes& changes) {
    DeltaHandle delta;
    EXPECT_EQ(create(table, delta), RECSDK_SERVING_OK);
    EXPECT_EQ(changes.add_to(delta), RECSDK_SERVING_OK);
    EXPECT_EQ(changes.erase_from(delta), RECSDK_SERVING_OK);
    EXPECT_EQ(changes.add_shared_to(delta), RECSDK_SERVING_OK);
    return delta;
  }

  static int take(const TableHandle& table, const DeltaHandle& delta) {
    return recsdk_serving_take(table.get(), delta.get());
  }

  /// call() with its n-th allocation failing; true if it makes more than n.
  static bool fails(std::int64_t n, int& status, const std::function<int()>& call) {
    allocations_left.store(n);
    status = call();
    const bool was_reached = allocations_left.exchange(-1) < 0;
    if (status == RECSDK_SERVING_OK) return was_reached;
    EXPECT_TRUE(was_reached);
    EXPECT_EQ(status, RECSDK_SERVING_ERROR_OUT_OF_MEMORY);
    EXPECT_STREQ(recsdk_serving_last_error_message(), "out of memory; free some");
    return true;
  }

  /// call() with each of its allocations failing once. Returns how often it failed.
  static int fail_each(const std::function<int()>& call) {
    int num_failed = 0;
    int status = RECSDK_SERVING_OK;
    for (std::int64_t n = 0; fails(n, status, call); ++n)
      num_failed += static_cast<int>(status != RECSDK_SERVING_OK);
    EXPECT_EQ(status, RECSDK_SERVING_OK);
    return num_failed;
  }

  TemporaryFolder folder_;
  std::vector<std::string> paths_;
  std::vector<const char*> files_;
};

TEST_F(ServingAllocationTest, Opening) {
  TableHandle whole;
  ASSERT_EQ(open(whole), RECSDK_SERVING_OK);
  TableHandle table;
  EXPECT_GT(fail_each([&] { return open(table); }), 5);
  EXPECT_TRUE(Answers(table.get()) == Answers(whole.get()));
  const char* const nothing[] = {"/nowhere/at/all/that/is/long/x.frozen"};
  recsdk_serving_table* none = nullptr;
  for (std::int64_t n = 0; n < 20; ++n) {
    allocations_left.store(n);
    const int status = recsdk_serving_open(nothing, 1, &none);
    const bool was_reached = allocations_left.exchange(-1) < 0;
    EXPECT_EQ(status, was_reached ? RECSDK_SERVING_ERROR_OUT_OF_MEMORY : RECSDK_SERVING_ERROR_FILE);
    EXPECT_EQ(none, nullptr);
  }
}

TEST_F(ServingAllocationTest, ReadingAllocatesNothing) {
  TableHandle table;
  ASSERT_EQ(open(table), RECSDK_SERVING_OK);
  ASSERT_EQ(take(table, delta_of(table, {30, true})), RECSDK_SERVING_OK);
  const Answers before(table.get());
  const std::vector<Key> keys = range(0, kNumKeys);
  std::vector<float> values(before.values.size());
  EXPECT_EQ(fail_each([&] {
              return recsdk_serving_lookup(table.get(), keys.data(), kNumKeys, values.data(),
                                           nullptr);
            }),
            0);
  EXPECT_EQ(values, before.values);
  EXPECT_EQ(fail_each([&] { return recsdk_serving_verify(table.get()); }), 0);
  EXPECT_EQ(fail_each([&] { return recsdk_serving_preload(table.get()); }), 0);
  std::vector<float> pooled(values.size());
  recsdk_serving_call call{};
  call.table = table.get();
  call.keys = keys.data();
  call.num_keys = call.num_bags = kNumKeys;
  call.out = pooled.data();
  call.stride = kDim;
  fail_each([&] { return recsdk_serving_pool(&call, 1); });  // which lists its calls
  EXPECT_EQ(pooled, before.values);
}

TEST_F(ServingAllocationTest, GatheringADelta) {
  TableHandle table;
  TableHandle twin;
  ASSERT_EQ(open(table), RECSDK_SERVING_OK);
  ASSERT_EQ(open(twin), RECSDK_SERVING_OK);
  DeltaHandle delta;
  EXPECT_GT(fail_each([&] { return create(table, delta); }), 0);
  const Changes changes(30, true);
  EXPECT_GT(fail_each([&] { return changes.add_to(delta); }), 1);
  EXPECT_GT(fail_each([&] { return changes.erase_from(delta); }), 0);
  EXPECT_GT(fail_each([&] { return changes.add_shared_to(delta); }), 0);
  // Nothing is in it twice, or it would be refused.
  ASSERT_EQ(take(table, delta), RECSDK_SERVING_OK);
  ASSERT_EQ(take(twin, delta_of(twin, changes)), RECSDK_SERVING_OK);
  EXPECT_TRUE(Answers(table.get()) == Answers(twin.get()));
}

// The third and fourth delta are merged with those before; what has no memory for that stays.
TEST_F(ServingAllocationTest, TakingDeltas) {
  for (const int num_before : {0, 1, 2, 3}) {
    SCOPED_TRACE(std::to_string(num_before) + " deltas before");
    const auto make = [&] {
      TableHandle table;
      EXPECT_EQ(open(table), RECSDK_SERVING_OK);
      for (int i = 0; i < num_before; ++i) {
        const DeltaHandle delta = delta_of(table, {50 * i, i == 1});
        EXPECT_EQ(take(table, delta), RECSDK_SERVING_OK);
      }
      return table;
    };
    const TableHandle twin = make();
    const Answers before(twin.get());
    const DeltaHandle delta = delta_of(twin, {20, true});
    ASSERT_EQ(take(twin, delta), RECSDK_SERVING_OK);
    const Answers after(twin.get());
    int num_failed = 0;
    int num_survived = 0;
    bool is_failing = true;
    for (std::int64_t n = 0; is_failing; ++n) {
      SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
      const TableHandle table = make();
      int status = RECSDK_SERVING_OK;
      is_failing = fails(n, status, [&] { return take(table, delta); });
      if (status != RECSDK_SERVING_OK) {
        ++num_failed;
        ASSERT_TRUE(Answers(table.get()) == before);
        ASSERT_EQ(take(table, delta), RECSDK_SERVING_OK);
      } else if (is_failing) {
        ++num_survived;
      }
      ASSERT_TRUE(Answers(table.get()) == after);
      // What was left unmerged is merged later.
      for (Key first = 100; first < 300; first += 50) {
        ASSERT_EQ(take(table, delta_of(table, {first, false})), RECSDK_SERVING_OK);
      }
    }
    EXPECT_GT(num_failed, 5);
    EXPECT_EQ(num_survived > 0, num_before > 0);
  }
}

}  // namespace
}  // namespace recsdk::test::serving_allocation_test
