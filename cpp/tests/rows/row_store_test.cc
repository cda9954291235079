// Where rows live: what is backed ahead of use.
#include "rows/row_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace recsdk::internal::row_store_test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kRowsAPage = static_cast<std::int64_t>(kHugePage) / (kDim * 4);
constexpr std::int64_t kFewRows = kRowsAPage / 4;  // before the first huge page

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

bool has_huge_pages() {
  const Pages pages(kHugePage, 0);
  *pages.data() = std::byte{1};
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
  for (int i = 0; i < 4; ++i) {
    append(kRowsAPage / 4);
    EXPECT_FALSE(populate_ahead());
  }
}

TEST_F(RowStoreAhead, BacksOnePageOfALargeStore) {
  append(kFewRows + 20 * kRowsAPage + kRowsAPage / 4);
  EXPECT_FALSE(populate_ahead());  // most of the last page is free
  append(kRowsAPage / 2);
  const std::int64_t next = kFewRows + 21 * kRowsAPage;
  EXPECT_FALSE(is_resident(record(next)));
  EXPECT_TRUE(populate_ahead());
  EXPECT_FALSE(populate_ahead());
  if (can_populate()) {
    EXPECT_TRUE(is_resident(record(next)));
    EXPECT_TRUE(is_resident(record(next + kRowsAPage - 1)));
    EXPECT_FALSE(is_resident(record(next + kRowsAPage)));
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

TEST(RowStorePages, AreSmallForFewRowsAndScalarsOnly) {
  RowStore store(RowLayout::make(kDim, OptimizerConfig::rowwise_adagrad()));
  const auto write_rows = [&store](RowNumber begin, RowNumber end) {
    store.grow(end);
    for (RowNumber row = begin; row < end; ++row) {
      *reinterpret_cast<float*>(store.records().record(row)) = static_cast<float>(row);
      *reinterpret_cast<float*>(store.records().scalars(row)) = 1.5F;
    }
  };
  const auto huge_bytes = [&store] {
    const std::byte* const scalars = store.records().scalars(0);
    return huge_bytes_between(store.records().record(0), scalars + 2 * kHugePage);
  };
  write_rows(0, kFewRows);
  EXPECT_EQ(huge_bytes(), 0);
  write_rows(kFewRows, kFewRows + kRowsAPage);
  const bool has_huge = has_huge_pages();
  EXPECT_EQ(huge_bytes(), has_huge ? kHugePage : 0);  // of rows: these scalars are few
  const RowNumber end = kFewRows + 3 * kRowsAPage;
  write_rows(kFewRows + kRowsAPage, end);
  EXPECT_EQ(huge_bytes(), has_huge ? 4 * kHugePage : 0);
  for (RowNumber row = 0; row < end; ++row) {
    ASSERT_EQ(*reinterpret_cast<float*>(store.records().record(row)), static_cast<float>(row));
    ASSERT_EQ(*reinterpret_cast<float*>(store.records().scalars(row)), 1.5F) << row;
  }
}

}  // namespace
}  // namespace recsdk::internal::row_store_test
