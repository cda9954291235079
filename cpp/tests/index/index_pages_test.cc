// An index takes little memory for few keys, and not much more than it counts for many.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "recsdk/recsdk.h"
#include "resident_memory.h"

namespace recsdk::test::index_pages_test {
namespace {

using Keys = std::vector<Key>;
constexpr std::size_t kKiB = 1024;
constexpr std::size_t kHeap = 12 * kKiB;  // at most, of an index: less where some was free before

Keys counted(std::size_t count) {
  Keys keys(count);
  std::iota(keys.begin(), keys.end(), Key{7});
  return keys;
}

Keys random_keys(std::size_t count) {
  std::mt19937_64 random(count);
  Keys keys(count);
  std::ranges::generate(keys, [&random] { return static_cast<Key>(random()); });
  return keys;
}

void insert(Index& index, const Keys& keys) {
  constexpr std::size_t kBatch = 1000;
  std::vector<RowNumber> rows(kBatch);
  std::vector<Outcome> outcomes(kBatch);
  for (std::size_t at = 0; at < keys.size(); at += kBatch) {
    const std::size_t count = std::min(kBatch, keys.size() - at);
    index.map(std::span(keys).subspan(at, count), std::span(rows).first(count),
              std::span(outcomes).first(count), {.insert = true});
  }
}

/// What each of some indexes with these keys takes.
ResidentMemory taken_by_each(const Keys& keys, std::size_t num_indexes) {
  IndexConfig config;
  config.hash_seed = 1;
  insert(*std::make_unique<Index>(config), keys);  // what a process needs once
  std::vector<std::unique_ptr<Index>> indexes;
  indexes.reserve(num_indexes);
  const ResidentMemory before = resident_memory();
  for (std::size_t i = 0; i < num_indexes; ++i) {
    indexes.push_back(std::make_unique<Index>(config));
    insert(*indexes.back(), keys);
  }
  const ResidentMemory after = resident_memory();
  return {(after.bytes - before.bytes) / num_indexes,
          (after.huge_bytes - before.huge_bytes) / num_indexes};
}

class IndexPages : public testing::Test {
 protected:
  void SetUp() override {
#ifndef RECSDK_TEST_SEES_ITS_MEMORY
    GTEST_SKIP() << "an emulator or a sanitizer has memory of its own";
#endif
    if (sysconf(_SC_PAGESIZE) != 4096) GTEST_SKIP() << "its figures are of pages of 4 KiB";
    if (resident_memory().bytes == 0) GTEST_SKIP() << "needs Linux 4.14 or newer";
  }
};

// Indexes beside each other, whose small pages could be taken for a huge one.
TEST_F(IndexPages, AreFewAndSmallForFewKeys) {
  constexpr std::size_t kFew = 10;
  constexpr std::size_t kMore = 1000;
  for (const auto& [count, pages] : {std::pair{kFew, 24 * kKiB}, std::pair{kMore, 76 * kKiB}}) {
    for (const Keys& keys : {counted(count), random_keys(count)}) {
      const ResidentMemory taken = taken_by_each(keys, 32);
      EXPECT_GE(taken.bytes, pages) << count;
      EXPECT_LE(taken.bytes, pages + kHeap) << count;
      EXPECT_EQ(taken.huge_bytes, 0U) << count;
    }
  }
}

// The first are on small pages: 256 KiB of what leads to row numbers, 512 KiB of keys by number.
TEST_F(IndexPages, AreHugeBehindTheFirstOfCountedIds) {
  const ResidentMemory taken = taken_by_each(counted(100'000), 1);
  constexpr std::size_t kSmall = (256 + 512 + 28) * kKiB;
  constexpr std::size_t kHuge = 2 * internal::kHugePage;  // one of each
  if (has_huge_pages()) {
    EXPECT_EQ(taken.huge_bytes, kHuge);
    EXPECT_GE(taken.bytes, kHuge + kSmall);
  }
  EXPECT_LE(taken.bytes, kHuge + kSmall + kHeap);
}

}  // namespace
}  // namespace recsdk::test::index_pages_test
