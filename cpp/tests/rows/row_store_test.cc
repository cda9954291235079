// Where rows live: what is backed ahead of use.
#include "rows/row_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "resident_memory.h"
#include "rows/row_numbers.h"
#include "rows/slabs.h"

namespace recsdk::internal::row_store_test {
namespace {

constexpr std::int64_t kDim = 64;
constexpr std::int64_t kRowsAPage = static_cast<std::int64_t>(kHugePage) / (kDim * 4);
constexpr std::int64_t kFewRows = kRowsAPage / 4;  // before the first huge page

bool is_resident(const void* address) {
  const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto page = reinterpret_cast<std::uintptr_t>(address) / size * size;
  unsigned char state = 0;
  return mincore(reinterpret_cast<void*>(page), size, &state) == 0 && (state & 1U) != 0;
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
    return test::resident_between(store.records().record(0), scalars + 2 * kHugePage).huge_bytes;
  };
  write_rows(0, kFewRows);
  EXPECT_EQ(huge_bytes(), 0);
  write_rows(kFewRows, kFewRows + kRowsAPage);
  const bool has_huge = test::has_huge_pages();
  EXPECT_EQ(huge_bytes(), has_huge ? kHugePage : 0);  // of rows: these scalars are few
  const RowNumber end = kFewRows + 3 * kRowsAPage;
  write_rows(kFewRows + kRowsAPage, end);
  EXPECT_EQ(huge_bytes(), has_huge ? 4 * kHugePage : 0);
  for (RowNumber row = 0; row < end; ++row) {
    ASSERT_EQ(*reinterpret_cast<float*>(store.records().record(row)), static_cast<float>(row));
    ASSERT_EQ(*reinterpret_cast<float*>(store.records().scalars(row)), 1.5F) << row;
  }
}

TEST(SlabsPopulate, BacksRecordsAndScalarsOfAnySize) {
  if (!can_populate()) GTEST_SKIP() << "needs Linux 5.14 or newer";
  std::mt19937 random(5);
  const auto below = [&random](std::int64_t end) {
    return static_cast<std::int64_t>(random()) % end;
  };
  for (int round = 0; round < 100; ++round) {
    const std::int64_t stride = 16 * (1 + below(1 << below(18)));
    const std::int64_t scalar_stride = 4 * below(5);
    const std::int64_t slab_bytes = std::int64_t{1} << (16 + below(8));
    Slabs slabs(stride, scalar_stride, slab_bytes);
    const std::int64_t most = 1 + 2 * slab_bytes / (stride + scalar_stride);
    const std::int64_t end = 1 + below(most);
    const std::int64_t begin = below(end);
    SCOPED_TRACE(testing::Message() << stride << " and " << scalar_stride << " of " << slab_bytes
                                    << " from " << begin << " to " << end);
    slabs.grow(end);
    if (below(2) == 0) {
      slabs.populate(begin, end);
    } else {
      slabs.populate_pages(begin, end, 3);
    }
    const RowAddresses rows = slabs.addresses();
    for (int i = 0; i < 20; ++i) {
      const std::int64_t row = i < 2 ? (i == 0 ? begin : end - 1) : begin + below(end - begin);
      ASSERT_TRUE(is_resident(rows.record(row))) << row;
      ASSERT_TRUE(is_resident(rows.record(row) + stride - 1)) << row;
      if (scalar_stride == 0) continue;
      ASSERT_TRUE(is_resident(rows.scalars(row))) << row;
      ASSERT_TRUE(is_resident(rows.scalars(row) + scalar_stride - 1)) << row;
    }
  }
}

#ifdef RECSDK_TEST_SEES_ITS_MEMORY
// Threads that met on a page would each clear it.
TEST(SlabsPopulate, GivesEachPageToOneThread) {
  if (!can_populate()) GTEST_SKIP() << "needs Linux 5.14 or newer";
  constexpr std::int64_t kPages = 24;
  const auto faults = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
  };
  const auto faults_of = [&faults](int num_threads) {
    long sum = 0;
    for (int round = 0; round < 20; ++round) {
      Slabs slabs(kDim * 4 + 16, 4, std::int64_t{64} << 20);
      const std::int64_t count = kPages * kRowsAPage;
      slabs.grow(count);
      const long before = faults();
      slabs.populate_pages(0, count, num_threads);
      sum += faults() - before;
    }
    return sum;
  };
  faults_of(2);  // the pool begins
  constexpr long kOther = 5;
  EXPECT_LE(faults_of(2), faults_of(1) + kOther);
}
#endif

TEST(RowNumbersPopulate, BacksNothingForRowsThatAreGivenAgain) {
  constexpr std::int64_t kRows = 1000;
  RowNumbers numbers;
  numbers.prepare_allocate(kRows);
  for (Key key = 0; key < kRows; ++key) numbers.allocate(key, RowState::kVisible);
  numbers.prepare_free(kRows);
  for (std::uint32_t row = 0; row < kRows; ++row) numbers.free(row, 0);
  numbers.release_before(1);
  numbers.prepare_allocate(kRows);
  numbers.populate(kRows, 1);
  EXPECT_FALSE(is_resident(numbers.keys().record(2 * kRows - 1)));
  numbers.prepare_allocate(2 * kRows);
  numbers.populate(2 * kRows, 1);
  if (can_populate()) {
    EXPECT_TRUE(is_resident(numbers.keys().record(2 * kRows - 1)));
  }
}

}  // namespace
}  // namespace recsdk::internal::row_store_test
