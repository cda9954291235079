// Where rows live: what is backed ahead of use.
#include "rows/row_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
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
