// The functions of C read, pool and replace the rows that missing keys of a table share.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "recsdk/serving/c_api.h"
#include "support/frozen_tables.h"

namespace recsdk::test::serving_shared_test {
namespace {

using Values = std::vector<float>;

constexpr std::int64_t kDim = 5;
constexpr std::int64_t kShared = 7;

/// A table of few rows and seven shared ones, of which some or all shards are open.
class SharedRowsCTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    std::mt19937_64 random(3);
    rows_ = random_rows(20, kDim, random);
    FreezeConfig config = config_of(folder_, kDim, dtype());
    config.num_shards = 3;
    config.num_shared = kShared;
    paths_ = freeze(rows_, config);
    shared_ = shared_rows_of(config);
    std::vector<const char*> files;
    for (const std::string& path : paths_) files.push_back(path.c_str());
    ASSERT_EQ(recsdk_serving_open(files.data(), std::ssize(files), &table_), RECSDK_SERVING_OK);
    for (const auto& [key, row] : rows_) keys_.push_back(key);
    for (std::int64_t key = 1000; key < 1100; ++key) keys_.push_back(key);
  }
  void TearDown() override { recsdk_serving_close(table_); }

  FrozenDType dtype() const { return static_cast<FrozenDType>(GetParam()); }
  Values wanted(Key key) const {
    const auto found = rows_.find(key);
    if (found != rows_.end()) return stored_values(dtype(), found->second);
    return stored_values(dtype(), shared_[static_cast<std::size_t>(shared_row(key, kShared))]);
  }
  std::uint8_t outcome(Key key) const {
    return rows_.contains(key) ? RECSDK_SERVING_FOUND : RECSDK_SERVING_MISSING;
  }
  void expect_lookup() const {
    Values values(keys_.size() * kDim);
    std::vector<std::uint8_t> outcomes(keys_.size());
    ASSERT_EQ(recsdk_serving_lookup(table_, keys_.data(), std::ssize(keys_), values.data(),
                                    outcomes.data()),
              RECSDK_SERVING_OK);
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const auto* const row = &values[i * kDim];
      ASSERT_EQ(Values(row, row + kDim), wanted(keys_[i])) << "key " << keys_[i];
      ASSERT_EQ(outcomes[i], outcome(keys_[i])) << "key " << keys_[i];
    }
  }
  /// A bag of each key: its sum, and its mean with a weight of 1/2, which rounds nothing.
  void expect_pool() const {
    const Values weights(keys_.size(), 0.5F);
    for (const bool is_weighted : {false, true}) {
      Values pooled(keys_.size() * kDim);
      std::vector<std::uint8_t> outcomes(keys_.size());
      recsdk_serving_call call{};
      call.table = table_;
      call.keys = keys_.data();
      call.num_keys = call.num_bags = std::ssize(keys_);
      call.weights = is_weighted ? weights.data() : nullptr;
      call.pooling = is_weighted ? RECSDK_SERVING_MEAN : RECSDK_SERVING_SUM;
      call.out = pooled.data();
      call.stride = kDim;
      call.outcomes = outcomes.data();
      ASSERT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_OK);
      for (std::size_t i = 0; i < keys_.size(); ++i) {
        const Values row = wanted(keys_[i]);
        for (std::size_t c = 0; c < kDim; ++c) ASSERT_EQ(pooled[i * kDim + c], row[c]) << i;
        ASSERT_EQ(outcomes[i], outcome(keys_[i]));
      }
    }
  }

  const TemporaryFolder folder_;
  Rows rows_;
  std::vector<std::string> paths_;
  std::vector<Values> shared_;
  std::vector<Key> keys_;
  recsdk_serving_table* table_ = nullptr;
};

TEST_P(SharedRowsCTest, MissingKeysReadThem) {
  recsdk_serving_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(recsdk_serving_get_info(table_, &info), RECSDK_SERVING_OK);
  EXPECT_EQ(info.num_shared, kShared);
  EXPECT_EQ(info.num_rows, 20);
  EXPECT_EQ(recsdk_serving_verify(table_), RECSDK_SERVING_OK);
  expect_lookup();
  expect_pool();
}

TEST_P(SharedRowsCTest, ADeltaBringsAllOfThemOrNone) {
  recsdk_serving_delta* delta = nullptr;
  ASSERT_EQ(recsdk_serving_delta_create(table_, &delta), RECSDK_SERVING_OK);
  const Key erased = keys_.front();  // and reads a shared row from then on
  ASSERT_EQ(recsdk_serving_delta_erase(delta, &erased, 1), RECSDK_SERVING_OK);
  std::vector<Values> after = shared_;
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (i > 0) {
      EXPECT_EQ(recsdk_serving_take(table_, delta), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
    }
    for (float& x : after[i]) x = 2.0F * x - 1.0F;
    const Key key = shared_row_key(static_cast<std::int64_t>(i), kShared);
    ASSERT_EQ(recsdk_serving_delta_add_shared(delta, &key, 1, after[i].data()), RECSDK_SERVING_OK);
    EXPECT_EQ(recsdk_serving_delta_add_shared(delta, &key, 1, after[i].data()),
              RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(recsdk_serving_delta_add_shared(delta, &key, 1, nullptr),
              RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  }
  expect_lookup();  // what was refused changed nothing
  ASSERT_EQ(recsdk_serving_take(table_, delta), RECSDK_SERVING_OK);
  recsdk_serving_delta_destroy(delta);
  shared_ = std::move(after);
  rows_.erase(erased);
  expect_lookup();
  expect_pool();
}

INSTANTIATE_TEST_SUITE_P(All, SharedRowsCTest, testing::Range(0, kNumFrozenDTypes));

}  // namespace
}  // namespace recsdk::test::serving_shared_test
