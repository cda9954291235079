// Where rows live: what is backed ahead of use.
#include "rows/row_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace recsdk::internal::row_store_test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kRowsAPage = static_cast<std::int64_t>(kHugePage) / (kDim * 4);

bool is_resident(const void* address) {
  const auto page = reinterpret_cast<std::uintptr_t>(address) / 4096 * 4096;
  unsigned char state = 0;
  return mincore(reinterpret_cast<void*>(page), 4096, &state) == 0 && (state & 1U) != 0;
}

// Old kernels back pages at first touch only.
bool can_populate() {
  const Pages pages(kHugePage, 0);
  pages.populate(0, kHugePage);
  return is_resident(pages.data());
}

// Of the mappings of which a part lies in [begin, end).
std::size_t huge_bytes_between(const void* begin, const void* end) {
  std::ifstream file("/proc/self/smaps");
  std::size_t bytes = 0;
  bool is_there = false;
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find('-');
    if (dash < line.find(' ')) {
      const auto first = static_cast<std::uintptr_t>(std::stoull(line, nullptr, 16));
      const auto last =
          static_cast<std::uintptr_t>(std::stoull(line.substr(dash + 1), nullptr, 16));
      is_there = first < reinterpret_cast<std::uintptr_t>(end) &&
                 last > reinterpret_cast<std::uintptr_t>(begin);
    }
    if (is_there && line.starts_with("AnonHugePages:"))
      bytes += std::stoull(line.substr(line.find(':') + 1)) * 1024;
  }
  return bytes;
}

// Old kernels cannot, and some systems have no huge pages.
bool can_make_huge() {
  const Pages pages(2 * kHugePage, SIZE_MAX);
  pages.populate(0, kHugePage);
  pages.make_huge(0, kHugePage);
  return huge_bytes_between(pages.data(), pages.data() + kHugePage) != 0;
}

class RowStoreAhead : public testing::Test {
 protected:
  void append(std::int64_t count) {
    end_ += count;
    store_.grow(end_);
  }
  bool populate_ahead() { return store_.populate_ahead(end_); }
  const void* record(std::int64_t row) const { return store_.records().record(row); }

  RowStore store_{RowLayout::make(kDim, OptimizerConfig::sgd())};
  RowNumber end_ = 0;
};

TEST_F(RowStoreAhead, LeavesSmallStoresAlone) {
  for (int i = 0; i < 3; ++i) {
    append(kRowsAPage / 4);
    EXPECT_FALSE(populate_ahead());
  }
  EXPECT_EQ(huge_bytes_between(record(0), record(kRowsAPage)), 0);
}

TEST_F(RowStoreAhead, MovesItsFirstRowsToAHugePageOnceTheyFillOne) {
  append(kRowsAPage / 2);
  const auto row = [this](std::int64_t i) {
    return reinterpret_cast<std::int64_t*>(store_.records().record(i));
  };
  append(kRowsAPage / 2);
  for (std::int64_t i = 0; i < kRowsAPage; ++i) *row(i) = i;
  std::atomic<bool> is_done = false;
  std::int64_t num_rounds = 0;
  std::thread writer([&] {  // each round adds one to every row
    while (!is_done || num_rounds == 0) {
      for (std::int64_t i = 0; i < kRowsAPage; ++i) ++*row(i);
      ++num_rounds;
    }
  });
  EXPECT_TRUE(populate_ahead());
  is_done = true;
  writer.join();
  EXPECT_FALSE(populate_ahead());
  for (std::int64_t i = 0; i < kRowsAPage; ++i) ASSERT_EQ(*row(i), i + num_rounds) << i;
  if (can_make_huge()) {
    EXPECT_EQ(huge_bytes_between(record(0), record(kRowsAPage)), kHugePage);
  }
}

TEST(RowStoreScalars, AreOnSmallPagesUntilThereAreMany) {
  RowStore store(RowLayout::make(kDim, OptimizerConfig::rowwise_adagrad()));
  RowNumber end = 0;
  const auto write_rows = [&](RowNumber new_end) {
    store.grow(new_end);
    for (; end < new_end; ++end) *reinterpret_cast<float*>(store.records().scalars(end)) = 1.5F;
  };
  const auto huge_bytes = [&store] {  // of scalars, as no record is written
    const std::byte* const first = store.records().record(0);
    return huge_bytes_between(first, store.records().scalars(0) + kHugePage);
  };
  write_rows(3 * kRowsAPage);
  EXPECT_FALSE(store.populate_ahead(end));
  EXPECT_EQ(huge_bytes(), 0);
  write_rows(4 * kRowsAPage);
  EXPECT_TRUE(store.populate_ahead(end));
  EXPECT_FALSE(store.populate_ahead(end));
  if (can_make_huge()) {
    EXPECT_EQ(huge_bytes(), kHugePage);
  }
  for (RowNumber row = 0; row < end; ++row)
    ASSERT_EQ(*reinterpret_cast<float*>(store.records().scalars(row)), 1.5F) << row;
}

TEST_F(RowStoreAhead, HasHugePagesAtOnceIfItBeginsLarge) {
  append(2 * kRowsAPage);
  EXPECT_FALSE(is_resident(record(0)));
  EXPECT_FALSE(populate_ahead());
}

TEST_F(RowStoreAhead, BacksOnePageOfALargeStore) {
  append(20 * kRowsAPage + kRowsAPage / 4);
  EXPECT_FALSE(populate_ahead());  // most of the last page is free
  append(kRowsAPage / 2);
  EXPECT_FALSE(is_resident(record(21 * kRowsAPage)));
  EXPECT_TRUE(populate_ahead());
  EXPECT_FALSE(populate_ahead());
  if (can_populate()) {
    EXPECT_TRUE(is_resident(record(21 * kRowsAPage)));
    EXPECT_TRUE(is_resident(record(22 * kRowsAPage - 1)));
  }
}

TEST_F(RowStoreAhead, BacksTheFirstPageOfTheNextSlab) {
  append(32 * kRowsAPage - kRowsAPage / 4);  // a slab of records is 64 MiB
  EXPECT_TRUE(populate_ahead());
  EXPECT_FALSE(populate_ahead());
  append(kRowsAPage / 2);
  if (can_populate()) {
    EXPECT_TRUE(is_resident(record(33 * kRowsAPage - 1)));
  }
}

}  // namespace
}  // namespace recsdk::internal::row_store_test
