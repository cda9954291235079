// Memory that stays with a table from one cut for the next.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "cut_helpers.h"
#include "recsdk/recsdk.h"
#include "util/memory.h"

namespace recsdk::test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::size_t kNumRows = 100'000;
constexpr std::size_t kNumChanged = 2000;
constexpr std::int64_t kCopyBytes = kDim * 4 + 4;  // weights and the state of rowwise Adagrad

std::atomic<std::size_t> taken_bytes{0};

/// Counts pages taken from the system while it lives.
class CountPages {
 public:
  CountPages() {
    taken_bytes = 0;
    internal::set_page_allocation_hook([](std::size_t bytes) { taken_bytes += bytes; });
  }
  CountPages(const CountPages&) = delete;
  CountPages& operator=(const CountPages&) = delete;
  ~CountPages() { internal::set_page_allocation_hook(nullptr); }
};

class CutMemoryTest : public testing::Test {
 protected:
  CutMemoryTest() : table_(config()), keys_(kNumRows) {
    std::iota(keys_.begin(), keys_.end(), Key{0});
    std::vector<float> values(kNumRows * kDim);
    table_.find_or_insert(keys_, values.data());
    update();
  }

  static TableConfig config() {
    TableConfig config;
    config.dim = kDim;
    config.optimizer = OptimizerConfig::rowwise_adagrad(0.1F);
    return config;
  }

  /// Rows all over the table.
  void update() {
    std::vector<Key> some;
    for (std::size_t i = 0; i < kNumChanged; ++i) some.push_back(keys_[i * 50]);
    const std::vector<float> gradients(kNumChanged * kDim, 1.0F);
    table_.apply_gradients(some, gradients.data());
  }

  /// What a cut and an update beside it take from the system.
  std::size_t bytes_taken_beside_a_cut() {
    const CountPages count;
    Cut cut = table_.cut({});
    update();
    return taken_bytes;
  }

  std::int64_t tracking_bytes() const { return table_.stats().tracking_bytes; }

  Table table_;
  std::vector<Key> keys_;
};

TEST_F(CutMemoryTest, TheFirstCutTakesMemoryAndTheNextFindsIt) {
  EXPECT_GT(bytes_taken_beside_a_cut(), 0U);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
  save(table_);
  EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
  save(table_, true);
  EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
}

TEST_F(CutMemoryTest, PreparedTheFirstCutFindsItToo) {
  EXPECT_EQ(tracking_bytes(), 0);
  table_.prepare_cuts(kNumChanged);
  EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
}

TEST_F(CutMemoryTest, AsMuchIsReadiedAsTwoUpdatesCopyAndASixteenthOfTheRows) {
  constexpr std::int64_t kChunk = std::int64_t{256} << 10;
  constexpr auto kRows = static_cast<std::int64_t>(kNumRows);
  constexpr std::int64_t kBits = 2 * (kRows / 8 + 8);
  table_.prepare_cuts(0);  // the update that was made counts
  const std::int64_t for_one = 2 * static_cast<std::int64_t>(kNumChanged) * kCopyBytes;
  EXPECT_GT(tracking_bytes(), for_one - kChunk);
  EXPECT_LE(tracking_bytes(), for_one + kBits + 4096);
  for (const std::int64_t rows : {kRows, std::numeric_limits<std::int64_t>::max()}) {
    table_.prepare_cuts(rows);
    EXPECT_GT(tracking_bytes(), kRows * kCopyBytes / 16 - kChunk);
    EXPECT_LE(tracking_bytes(), kRows * kCopyBytes / 16 + kBits + 4096);
  }
  EXPECT_THROW(table_.prepare_cuts(-1), std::invalid_argument);
}

TEST_F(CutMemoryTest, WhatIsPreparedBesideAnOpenCutStays) {
  Cut cut = table_.cut({});
  const std::int64_t open = tracking_bytes();
  table_.prepare_cuts(static_cast<std::int64_t>(kNumRows));
  const std::int64_t both = tracking_bytes();
  cut.finish(false);
  EXPECT_GT(tracking_bytes(), 1'000'000);
  EXPECT_LT(open + tracking_bytes(), both + 100'000);
  EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
}

TEST_F(CutMemoryTest, MemoryIsCountedWhileACutIsOpen) {
  table_.prepare_cuts(static_cast<std::int64_t>(kNumRows));
  const std::int64_t before = tracking_bytes();
  const Cut cut = table_.cut({});
  EXPECT_GE(tracking_bytes(), before);
  update();
  EXPECT_GE(tracking_bytes() + cut.copied_bytes(), before);
}

TEST_F(CutMemoryTest, RowsThatComeOftenInAnUpdateCountOnce) {
  table_.prepare_cuts(0);
  const std::int64_t before = tracking_bytes();
  constexpr std::size_t kOccurrences = 50'000;
  std::vector<Key> few(kOccurrences);
  for (std::size_t i = 0; i < kOccurrences; ++i) few[i] = static_cast<Key>(i % 100);
  const std::vector<float> gradients(kOccurrences * kDim, 1.0F);
  table_.apply_gradients(few, gradients.data());
  table_.prepare_cuts(0);
  EXPECT_EQ(tracking_bytes(), before);
}

// What is kept is a cut's memory as well, so it may hold no more than its limit.
TEST_F(CutMemoryTest, ALimitHoldsForWhatIsKept) {
  table_.prepare_cuts(static_cast<std::int64_t>(kNumRows));
  const std::int64_t before = tracking_bytes();
  const Bytes file = [&] {
    Cut cut = table_.cut({.changes_only = false, .max_copy_bytes = 0});
    MemorySink sink;
    write_rows(cut, sink, {.token = {}, .file = tiny_blocks(), .policies = {}, .progress = {}});
    cut.finish(true);
    return sink.content;
  }();
  EXPECT_LT(tracking_bytes(), before - 1'000'000);
  EXPECT_EQ(by_key(read_all(open(file)).rows), by_key(visible_rows(table_)));
}

// A cut that was given up half-way leaves nothing of itself to the next.
TEST_F(CutMemoryTest, NothingOfACutGetsIntoTheNext) {
  for (int i = 0; i < 3; ++i) {
    Cut cut = table_.cut({});
    update();
    cut.finish(i == 1);
    table_.erase(std::vector<Key>{keys_[static_cast<std::size_t>(i) + 1]});
  }
  EXPECT_EQ(by_key(read_all(open(save(table_))).rows), by_key(visible_rows(table_)));
  update();
  EXPECT_EQ(read_all(open(save(table_, true))).rows.size(), kNumChanged);
}

}  // namespace
}  // namespace recsdk::test
