// Rows that are noted while a look takes them.
#include "eviction/unmeasured.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "rows/row_numbers.h"

namespace recsdk::internal::unmeasured_test {
namespace {

constexpr std::uint32_t kRows = 1'000;

TEST(UnmeasuredTest, ALookTakesRowsThatAreNotedMeanwhileOnceOrLeavesThemToTheNext) {
  RowNumbers numbers(0);
  numbers.prepare_allocate(kRows);
  for (std::uint32_t row = 0; row < kRows; ++row) numbers.allocate(row, RowState::kVisible);
  Unmeasured unmeasured;
  unmeasured.grow(kRows);
  for (int turn = 0; turn < 50; ++turn) {
    std::atomic<bool> begun = false;
    std::thread noting([&] {
      for (std::uint32_t row = 0; row < kRows; ++row) {
        unmeasured.note(row);
        begun = true;
      }
    });
    while (!begun) std::this_thread::yield();
    std::vector<int> num_taken(kRows);
    for (int look = 0; look < 4; ++look)
      for (const std::uint32_t row : unmeasured.take(numbers)) ++num_taken[row];
    noting.join();
    for (const std::uint32_t row : unmeasured.take(numbers)) ++num_taken[row];
    ASSERT_EQ(num_taken, std::vector<int>(kRows, 1));
  }
}

}  // namespace
}  // namespace recsdk::internal::unmeasured_test
