// Memory that stays with a table from one cut for the next.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "recsdk/recsdk.h"
#include "resident_memory.h"
#include "saving_tables.h"
#include "util/memory.h"

namespace recsdk::test::cut_memory_test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::size_t kNumRows = 100'000;
constexpr std::size_t kNumChanged = 2000;
// Weights, the state of rowwise Adagrad, key and row number.
constexpr std::int64_t kCopyBytes = kDim * 4 + 4 + 8 + 4;
constexpr std::int64_t kChunksOfBands = std::int64_t{32 * 256} << 10;  // partly used

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

  void update_all() {
    const std::vector<float> gradients(kNumRows * kDim, 1.0F);
    table_.apply_gradients(keys_, gradients.data());
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

TEST_F(CutMemoryTest, UpdatesReadyMemorySoThatTheFirstCutFindsItToo) {
  for (int i = 0; i < 40; ++i) update();
  {
    const CountPages count;
    update();
    EXPECT_EQ(taken_bytes, 0U);
  }
  EXPECT_EQ(bytes_taken_beside_a_cut(), 0U);
}

TEST_F(CutMemoryTest, AsMuchIsReadiedAsTwoUpdatesCopyAndAnEighthOfTheRows) {
  constexpr std::int64_t kChunk = std::int64_t{256} << 10;
  constexpr auto kRows = static_cast<std::int64_t>(kNumRows);
  constexpr std::int64_t kBits = 2 * (kRows / 8 + 8);
  for (int i = 0; i < 40; ++i) update();
  const std::int64_t for_two =
      std::min(2 * static_cast<std::int64_t>(kNumChanged) * kCopyBytes + 32 * kChunk,
               kRows * kCopyBytes / 8);
  EXPECT_GT(tracking_bytes(), for_two - kChunk);
  EXPECT_LE(tracking_bytes(), for_two + kBits + 4096);
  for (int i = 0; i < 40; ++i) update_all();
  EXPECT_GT(tracking_bytes(), kRows * kCopyBytes / 8 - kChunk);
  EXPECT_LE(tracking_bytes(), kRows * kCopyBytes / 8 + kBits + 4096);
}

// No update readies more than a share, or it would be the one that waits.
TEST_F(CutMemoryTest, AnUpdateReadiesASixteenthOfWhatItCopies) {
  const std::int64_t bits = tracking_bytes();
  std::int64_t before = bits;
  for (int i = 0; i < 40; ++i) {
    update_all();
    constexpr std::int64_t kShare = static_cast<std::int64_t>(kNumRows) * kCopyBytes / 16;
    EXPECT_LE(tracking_bytes() - before, kShare + (std::int64_t{256} << 10) + 100'000);
    before = tracking_bytes();
  }
  EXPECT_GT(before, bits);
}

#ifdef RECSDK_TEST_SEES_ITS_MEMORY
std::int64_t num_page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Rows all over a large table, whose copies lie in as many places as there can be.
TEST_F(CutMemoryTest, TheFirstUpdateBesideTheFirstCutTouchesNoFreshMemory) {
  std::vector<Key> keys(400'000);
  std::iota(keys.begin(), keys.end(), Key{0});
  Table table(config());
  {
    std::vector<float> values(keys.size() * kDim);
    table.find_or_insert(keys, values.data());
  }
  std::vector<Key> some;
  for (std::size_t i = 0; i < keys.size(); i += 40) some.push_back(keys[i]);
  const std::vector<float> gradients(some.size() * kDim, 1.0F);
  for (int i = 0; i < 80; ++i) table.apply_gradients(some, gradients.data());
  const auto faults_of_an_update = [&] {
    const std::int64_t before = num_page_faults();
    table.apply_gradients(some, gradients.data());
    return num_page_faults() - before;
  };
  std::int64_t without = INT64_MAX;
  for (int i = 0; i < 5; ++i) without = std::min(without, faults_of_an_update());
  const Cut cut = table.cut({});
  const std::int64_t faults = faults_of_an_update();
  EXPECT_GT(cut.copied_bytes(), 2'000'000);
  EXPECT_LT(faults, without + 40);  // less than one piece of memory for copies would cost
}
#endif

TEST_F(CutMemoryTest, ATableThatIsOnlyReadOrSmallReadiesNothing) {
  Table other(config());
  std::vector<float> values(kNumRows * kDim);
  other.find_or_insert(keys_, values.data());
  EXPECT_EQ(other.stats().tracking_bytes, 0);
  Table small(config());
  const std::vector<Key> few(keys_.begin(), keys_.begin() + kNumChanged);
  small.find_or_insert(few, values.data());
  for (int i = 0; i < 4; ++i) small.apply_gradients(few, values.data());
  EXPECT_EQ(small.stats().tracking_bytes, 0);
}

TEST_F(CutMemoryTest, NothingIsReadiedBesideAnOpenCut) {
  for (int i = 0; i < 40; ++i) update();
  const Cut cut = table_.cut({});
  const std::int64_t before = tracking_bytes() + cut.copied_bytes();
  for (int i = 0; i < 40; ++i) update();
  EXPECT_LE(tracking_bytes() + cut.copied_bytes(), before + kChunksOfBands);
}

TEST_F(CutMemoryTest, MemoryIsCountedWhileACutIsOpen) {
  for (int i = 0; i < 40; ++i) update_all();
  const std::int64_t before = tracking_bytes();
  const Cut cut = table_.cut({});
  EXPECT_GE(tracking_bytes(), before);
  update();
  EXPECT_GE(tracking_bytes() + cut.copied_bytes(), before);
}

TEST_F(CutMemoryTest, RowsThatComeOftenInAnUpdateCountOnce) {
  for (int i = 0; i < 40; ++i) update();
  const std::int64_t before = tracking_bytes();
  constexpr std::size_t kOccurrences = 50'000;
  std::vector<Key> few(kOccurrences);
  for (std::size_t i = 0; i < kOccurrences; ++i) few[i] = static_cast<Key>(i % 100);
  const std::vector<float> gradients(kOccurrences * kDim, 1.0F);
  for (int i = 0; i < 10; ++i) table_.apply_gradients(few, gradients.data());
  EXPECT_EQ(tracking_bytes(), before);
}

TEST_F(CutMemoryTest, ARestoreToFarFewerRowsKeepsNothingOfTheOldSize) {
  Table small(config());
  std::vector<float> value(kDim);
  small.find_or_insert(std::vector<Key>{1}, value.data());
  const Bytes file = save(small);
  for (int i = 0; i < 40; ++i) update();
  EXPECT_GT(tracking_bytes(), 500'000);
  Restore restore(table_);
  RowFileReader reader = open(file);
  restore.add_file(reader, {});
  restore.commit(0, 0.0);
  EXPECT_LT(tracking_bytes(), 100'000);
}

// What is kept is a cut's memory as well, so it may hold no more than its limit.
TEST_F(CutMemoryTest, ALimitHoldsForWhatIsKept) {
  for (int i = 0; i < 40; ++i) update_all();
  const std::int64_t before = tracking_bytes();
  const Bytes file = [&] {
    Cut cut = table_.cut({.changes_only = false, .max_copy_bytes = 0});
    MemorySink sink;
    write_rows(cut, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
    cut.finish(true);
    return sink.content;
  }();
  EXPECT_LT(tracking_bytes(), before - 1'000'000);
  EXPECT_TRUE(by_key(read_all(open(file)).rows) == by_key(visible_rows(table_)));
  for (int i = 0; i < 40; ++i) update_all();
  EXPECT_LT(tracking_bytes(), before - 1'000'000);
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
}  // namespace recsdk::test::cut_memory_test
