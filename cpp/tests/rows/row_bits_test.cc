// Bits of rows against a plain model.
#include "rows/row_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "rows/row_numbers.h"

namespace recsdk::internal::row_bits_test {
namespace {

TEST(RowBitsTest, AreAsSet) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto num_rows = static_cast<std::int64_t>(1 + random() % 500);
    RowBits bits;
    bits.grow(num_rows);
    std::vector<bool> expected(static_cast<std::size_t>(num_rows));
    for (int i = 0; i < 100; ++i) {
      const auto row = static_cast<std::int64_t>(random()) % num_rows;
      const bool value = random() % 2 == 0;
      switch (random() % 5) {
        case 0: {
          const std::int64_t end = row + static_cast<std::int64_t>(random()) % (num_rows - row + 1);
          bits.set_all_alone(row, end);
          std::fill(expected.begin() + row, expected.begin() + end, true);
          break;
        }
        case 1:
          bits.assign_alone(row, value);
          expected[static_cast<std::size_t>(row)] = value;
          break;
        case 2: {
          std::vector<GradItem> items(random() % 40);
          for (GradItem& item : items)
            item = {static_cast<std::uint32_t>(random() % static_cast<unsigned>(num_rows)), 0};
          std::sort(items.begin(), items.end(),
                    [](const GradItem& a, const GradItem& b) { return a.row < b.row; });
          const std::size_t begin = items.size() / 3;  // a piece begins and ends at any row
          const std::size_t end = items.size() - items.size() / 4;
          bits.set(items.data(), static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
          for (std::size_t j = begin; j < end; ++j) expected[items[j].row] = true;
          break;
        }
        case 3:
          bits.set(row);
          expected[static_cast<std::size_t>(row)] = true;
          break;
        default:
          bits.clear(row);
          expected[static_cast<std::size_t>(row)] = false;
      }
      for (std::int64_t r = 0; r < num_rows; ++r)
        ASSERT_EQ(bits.test(r), expected[static_cast<std::size_t>(r)]) << "row " << r;
    }
    bits.clear_all();
    for (std::int64_t r = 0; r < num_rows; ++r) ASSERT_FALSE(bits.test(r));
  }
}

TEST(RowBitsTest, AreBackedPieceByPieceAndAsTheyGrow) {
  constexpr std::int64_t kPiece = 32'768 * kWordRows;
  RowBits bits;
  EXPECT_TRUE(bits.back_some());
  bits.grow(2 * kPiece + 1);
  EXPECT_FALSE(bits.back_some());
  EXPECT_FALSE(bits.back_some());
  EXPECT_TRUE(bits.back_some());
  bits.grow(3 * kPiece);
  EXPECT_TRUE(bits.back_some());
  bits.grow(5 * kPiece);
  bits.clear_all();
  EXPECT_TRUE(bits.back_some());
}

// States are kept in bits: each change leaves the other rows as they were.
TEST(RowNumbersStates, AreAsGiven) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    RowNumbers numbers;
    std::vector<RowState> expected;
    const auto draw = [&] { return random() % 2 == 0 ? RowState::kVisible : RowState::kInFlight; };
    for (int i = 0; i < 60; ++i) {
      const RowState state = draw();
      switch (random() % 5) {
        case 4: {  // as so many calls of allocate
          std::vector<Key> keys(random() % 200);
          std::iota(keys.begin(), keys.end(), 10);
          std::vector<Outcome> outcomes(keys.size());
          for (Outcome& o : outcomes) o = random() % 3 == 0 ? Outcome::kFound : Outcome::kInserted;
          numbers.prepare_allocate(static_cast<std::int64_t>(keys.size()));
          std::vector<std::uint32_t> rows;
          for (const Outcome o : outcomes) {
            if (o != Outcome::kInserted) continue;
            rows.push_back(numbers.to_allocate(static_cast<std::int64_t>(rows.size())));
          }
          numbers.allocate_all(rows, keys, outcomes.data(), state);
          expected.resize(static_cast<std::size_t>(numbers.end()));
          auto row = rows.begin();
          for (std::size_t k = 0; k < keys.size(); ++k) {
            if (outcomes[k] != Outcome::kInserted) continue;
            ASSERT_EQ(numbers.key(*row), keys[k]);
            expected[*row++] = state;
          }
          break;
        }
        case 0: {
          const std::vector<Key> keys(random() % 200, 1);
          std::vector<Outcome> outcomes(keys.size());
          for (Outcome& o : outcomes) o = random() % 3 == 0 ? Outcome::kFound : Outcome::kInserted;
          if (!numbers.prepare_append(static_cast<std::int64_t>(keys.size()))) break;
          numbers.append(keys, outcomes.data(), state);
          expected.resize(static_cast<std::size_t>(numbers.end()), state);
          break;
        }
        case 1: {
          numbers.prepare_allocate(1);
          const std::uint32_t row = numbers.allocate(2, state);
          expected.resize(static_cast<std::size_t>(numbers.end()));
          expected[row] = state;
          break;
        }
        default: {
          if (expected.empty()) break;
          const auto row = static_cast<std::uint32_t>(random() % expected.size());
          if (expected[row] == RowState::kFree) break;
          if (random() % 2 == 0) {
            numbers.set_state(row, state);
            expected[row] = state;
            break;
          }
          numbers.prepare_free(1);
          numbers.free(row, 0);
          numbers.release_before(1);
          expected[row] = RowState::kFree;
        }
      }
      for (std::size_t r = 0; r < expected.size(); ++r) {
        const auto row = static_cast<RowNumber>(r);
        ASSERT_EQ(numbers.state(row), expected[r]) << "row " << r;
        ASSERT_EQ(numbers.visible().test(row), expected[r] == RowState::kVisible);
      }
    }
  }
}

}  // namespace
}  // namespace recsdk::internal::row_bits_test
