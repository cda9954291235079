// Updates beside an open cut: each row is copied just before it changes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cut/update_copies.h"
#include "profile.h"
#include "recsdk/recsdk.h"
#include "saving_tables.h"
#include "table/cut.h"

namespace recsdk::test::update_copies_test {
namespace {

constexpr std::int64_t kDim = 16;
constexpr std::size_t kNumRows = 40'000;  // several regions of copies

TableConfig config(NonFinite on_nonfinite, int num_threads) {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = OptimizerConfig::rowwise_adagrad(0.1F);
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  config.hash_seed = 3;
  config.num_threads = num_threads;
  config.on_nonfinite = on_nonfinite;
  return config;
}

class UpdateCopiesTest : public testing::TestWithParam<int> {
 protected:
  explicit UpdateCopiesTest(NonFinite on_nonfinite = NonFinite::kRaise)
      : table_(config(on_nonfinite, GetParam())), twin_(config(on_nonfinite, 1)) {
    std::vector<Key> keys(kNumRows);
    std::iota(keys.begin(), keys.end(), Key{0});
    std::vector<float> values(kNumRows * kDim);
    table_.find_or_insert(keys, values.data());
    twin_.find_or_insert(keys, values.data());
  }

  /// Keys of which some come often: of the lowest `range`, so that rows lie close or far apart.
  std::vector<Key> draw(std::size_t n, std::uint64_t range) {
    std::vector<Key> keys(n);
    for (Key& key : keys)
      key = static_cast<Key>(random_() % (random_() % 4 == 0 ? range / 100 + 1 : range));
    return keys;
  }

  std::vector<float> gradients(std::size_t n) {
    std::vector<float> made(n * kDim);
    for (float& x : made) x = static_cast<float>(random_() % 1000) / 500.0F - 1.0F;
    return made;
  }

  void update_both(const std::vector<Key>& keys, const std::vector<float>& grads) {
    table_.apply_gradients(keys, grads.data());
    twin_.apply_gradients(keys, grads.data());
  }

  static Bytes write(Cut& cut) {
    MemorySink sink;
    write_rows(cut, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
    return sink.content;
  }

  Table table_;
  Table twin_;  // without cuts
  std::mt19937_64 random_{7};
};

TEST_P(UpdateCopiesTest, TheCutHoldsTheOldRowsAndTheTableTheNew) {
  // Below, at and above what is copied at a time, what a thread takes, and both.
  const std::vector<std::size_t> sizes =
      is_full_profile()
          ? std::vector<std::size_t>{1, 255, 256, 257, 8191, 8192, 8193, 20'000, 40'000}
          : std::vector<std::size_t>{1, 256, 8193, 40'000};
  for (const std::size_t n : sizes) {
    for (const std::uint64_t range : {std::uint64_t{50}, std::uint64_t{3000}, kNumRows * 1UL}) {
      SCOPED_TRACE(std::to_string(n) + " keys below " + std::to_string(range));
      const std::vector<FileRow> expected = visible_rows(table_);
      Cut cut = table_.cut({});
      for (int i = 0; i < 3; ++i) update_both(draw(n, range), gradients(n));
      EXPECT_GT(cut.copied_bytes(), 0);
      EXPECT_EQ(by_key(read_all(open(write(cut))).rows), by_key(expected));
      cut.finish(true);
      ASSERT_EQ(visible_rows(table_), visible_rows(twin_));
    }
  }
}

TEST_P(UpdateCopiesTest, ALimitOfCopiesIsKeptOrOneUpdateAloneGoesBeyond) {
  constexpr std::int64_t kLimit = 200'000;
  const std::vector<FileRow> expected = visible_rows(table_);
  Cut cut = table_.cut({.changes_only = false, .max_copy_bytes = kLimit});
  update_both(draw(1000, kNumRows), gradients(1000));
  update_both(draw(1000, kNumRows), gradients(1000));
  EXPECT_LE(cut.max_copied_bytes(), kLimit);
  EXPECT_EQ(by_key(read_all(open(write(cut))).rows), by_key(expected));
  cut.finish(false);
  EXPECT_EQ(visible_rows(table_), visible_rows(twin_));
}

// Whoever catches the error and goes on may do so all the time that the cut is open.
TEST_P(UpdateCopiesTest, AnUpdateThatIsRefusedCopiesNothing) {
  const std::vector<FileRow> expected = visible_rows(table_);
  Cut cut = table_.cut({});
  std::vector<float> grads = gradients(9000);
  grads[8999 * kDim] = NAN;
  for (int i = 0; i < 3; ++i)
    EXPECT_THROW(table_.apply_gradients(draw(9000, kNumRows), grads.data()), Error);
  EXPECT_EQ(cut.max_copied_bytes(), 0);
  EXPECT_EQ(visible_rows(table_), expected);
  update_both(draw(500, kNumRows), gradients(500));
  EXPECT_EQ(by_key(read_all(open(write(cut))).rows), by_key(expected));
  EXPECT_EQ(visible_rows(table_), visible_rows(twin_));
}

// Batches are mapped ahead while another one is updated, also while a cut is open.
TEST_P(UpdateCopiesTest, KeysAreInsertedWhileAnUpdateCopies) {
  Cut cut = table_.cut({});
  internal::CutState& state = *CutAccess::impl(cut).state;
  const std::vector<Key> keys = draw(1000, kNumRows);
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  table_.map(keys, rows, outcomes, {.insert = false, .lease = nullptr});
  const std::vector<float> grads = gradients(keys.size());
  const GradBlock block{{rows, outcomes, {}, {}, Pooling::kSum}, grads.data(), kDim, nullptr};
  const internal::SortedGradients sorted = internal::sort_gradients({&block, 1}, kNumRows, 1);
  const internal::CutState::UpdateCopies copies = state.plan(sorted, 1);
  ASSERT_FALSE(copies.is_empty());
  std::vector<float> values(2 * kDim);
  table_.find_or_insert(std::vector<Key>{5, -5}, values.data());  // would wait for ever
  EXPECT_EQ(table_.size(), static_cast<std::int64_t>(kNumRows) + 1);
}

INSTANTIATE_TEST_SUITE_P(Threads, UpdateCopiesTest, testing::Values(1, 2));

class SkippingUpdateCopiesTest : public UpdateCopiesTest {
 protected:
  SkippingUpdateCopiesTest() : UpdateCopiesTest(NonFinite::kSkip) {}
};

TEST_P(SkippingUpdateCopiesTest, SkippedRowsAreCountedAsWithoutACut) {
  const std::vector<FileRow> expected = visible_rows(table_);
  Cut cut = table_.cut({});
  std::vector<float> grads = gradients(20'000);
  for (std::size_t i = 0; i < 20'000; i += 7) grads[i * kDim + 1] = NAN;
  update_both(draw(20'000, kNumRows), grads);
  EXPECT_GT(table_.stats().nonfinite, 0U);
  EXPECT_EQ(table_.stats().nonfinite, twin_.stats().nonfinite);
  EXPECT_EQ(by_key(read_all(open(write(cut))).rows), by_key(expected));
  EXPECT_EQ(visible_rows(table_), visible_rows(twin_));
}

INSTANTIATE_TEST_SUITE_P(Threads, SkippingUpdateCopiesTest, testing::Values(1, 2));

}  // namespace
}  // namespace recsdk::test::update_copies_test
