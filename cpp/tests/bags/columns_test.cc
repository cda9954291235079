// Columns put in a random order, and interleaved, against plain loops.
#include "recsdk/columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace recsdk::columns_test {
namespace {

using Bytes = std::vector<std::byte>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<std::int64_t> order_of(const Shuffle& shuffle) {
  std::vector<std::int64_t> order(at(shuffle.num_rows()));
  shuffle.write_order(order);
  return order;
}

/// How a number of rows is cut into parts, some of them empty.
std::vector<std::int64_t> cut(std::mt19937_64& random, std::int64_t num_rows) {
  std::vector<std::int64_t> sizes;
  while (num_rows > 0 || random() % 3 == 0) {
    sizes.push_back(static_cast<std::int64_t>(random() % (at(num_rows) + 1)));
    num_rows -= sizes.back();
    if (sizes.size() > 6) sizes.push_back(std::exchange(num_rows, 0));
  }
  return sizes;
}

/// One column in pieces that lie apart, so that a step over an end is seen by a sanitizer.
struct Pieces {
  std::vector<Bytes> bytes;
  std::vector<void*> pointers;
  std::vector<const void*> sources;

  Pieces(const std::vector<std::int64_t>& sizes, std::int64_t width) {
    for (const std::int64_t size : sizes) bytes.emplace_back(at(size * width));
    for (Bytes& each : bytes) pointers.push_back(each.data());
    for (Bytes& each : bytes) sources.push_back(each.data());
  }

  Bytes joined() const {
    Bytes whole;
    for (const Bytes& each : bytes) whole.insert(whole.end(), each.begin(), each.end());
    return whole;
  }
};

void fill(Pieces& pieces, std::mt19937_64& random) {
  for (Bytes& each : pieces.bytes)
    for (std::byte& byte : each) byte = static_cast<std::byte>(random());
}

Bytes expected_of(const Bytes& whole, const std::vector<std::int64_t>& order, std::int64_t skip,
                  std::int64_t width) {
  Bytes expected;
  for (std::size_t n = at(skip); n < order.size(); ++n) {
    const auto row = whole.begin() + (order[n] * width);
    expected.insert(expected.end(), row, row + width);
  }
  return expected;
}

TEST(Shuffle, IsAPermutationThatNumberAndSeedDecide) {
  for (const std::int64_t size : {0, 1, 2, 100, 2048, 2049, 70'000}) {
    std::vector<std::int64_t> rows(at(size));
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<std::int64_t> order = order_of(Shuffle(size, 7));
    EXPECT_EQ(order, order_of(Shuffle(size, 7)));
    if (size >= 100) {
      EXPECT_NE(order, order_of(Shuffle(size, 8)));
      EXPECT_NE(order, rows);
    }
    std::ranges::sort(order);
    EXPECT_EQ(order, rows);
  }
}

TEST(Shuffle, MakesEachOrderOfFourRowsAsOften) {
  std::map<std::vector<std::int64_t>, int> counts;
  constexpr int kDraws = 24'000;
  for (std::uint64_t seed = 0; seed < kDraws; ++seed) ++counts[order_of(Shuffle(4, seed))];
  EXPECT_EQ(counts.size(), 24U);
  double chi = 0;
  for (const auto& [order, count] : counts) chi += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi, 60);  // 23 degrees of freedom: 49.7 is one chance in a thousand
}

TEST(Shuffle, SendsRowsOfManyGroupsAnywhere) {
  // Of 8 groups: how many rows of each eighth come in each eighth of the order.
  constexpr std::int64_t kRows = 8 * 2048;
  std::vector<int> counts(64);
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const std::vector<std::int64_t> order = order_of(Shuffle(kRows, seed));
    for (std::size_t n = 0; n < order.size(); ++n)
      ++counts[((n / 2048) * 8) + (at(order[n]) / 2048)];
  }
  double chi = 0;
  for (const int count : counts) chi += (count - 4096.0) * (count - 4096.0) / 4096.0;
  EXPECT_LT(chi, 100);  // 49 degrees of freedom: 85.4 is one chance in a thousand
}

TEST(Shuffle, PutsColumnsOfAnyWidthInItsOrder) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    // Columns of 20'000 rows are written past the caches. Those of 300'000 leave them, and go
    // through groups, of which there are a few on machines whose caches nobody knows.
    const std::int64_t many = random() % 2 == 0 ? 5000 : 20'000;
    const std::int64_t few = static_cast<std::int64_t>(random() % 50);
    const std::int64_t size = round % 100 == 0 ? 300'000 : random() % 20 == 0 ? many : few;
    const auto skip = static_cast<std::int64_t>(random() % (at(size) + 1));
    const Shuffle shuffle(size, random());
    const auto part_rows = cut(random, size);
    const auto stretch_rows = cut(random, size - skip);
    std::vector<std::int64_t> widths;
    for (std::uint64_t left = size > many ? 2 : random() % 5; left > 0; --left) {
      const std::int64_t known[] = {4, 8, static_cast<std::int64_t>(1 + (random() % 70))};
      widths.push_back(known[random() % 3]);
    }
    std::vector<Pieces> parts;
    std::vector<Pieces> stretches;
    for (const std::int64_t width : widths) {
      parts.emplace_back(part_rows, width);
      stretches.emplace_back(stretch_rows, width);
      fill(parts.back(), random);
    }
    std::vector<ShuffledColumn> columns;
    for (std::size_t c = 0; c < widths.size(); ++c)
      columns.push_back({widths[c], parts[c].sources, stretches[c].pointers});
    shuffle.write(part_rows, stretch_rows, skip, columns);
    for (std::size_t c = 0; c < widths.size(); ++c)
      ASSERT_EQ(stretches[c].joined(),
                expected_of(parts[c].joined(), order_of(shuffle), skip, widths[c]));
  }
}

TEST(Shuffle, RefusesWhatDoesNotFitAndWritesNothing) {
  EXPECT_THROW(Shuffle(-1, 0), std::invalid_argument);
  EXPECT_THROW(Shuffle(std::int64_t{1} << 32, 0), std::invalid_argument);
  const Shuffle shuffle(3, 0);
  std::vector<std::int64_t> short_order(2);
  EXPECT_THROW(shuffle.write_order(short_order), std::invalid_argument);
  const std::vector<std::int64_t> from{1, 2, 3};
  std::vector<std::int64_t> to{7, 7, 7};
  const void* const part = from.data();
  void* const stretch = to.data();
  const auto write = [&](std::int64_t rows, std::int64_t out, std::int64_t skip, std::int64_t width,
                         std::size_t num_parts) {
    const ShuffledColumn column{width, {&part, num_parts}, {&stretch, 1}};
    shuffle.write({{rows}}, {{out}}, skip, {{column}});
  };
  EXPECT_THROW(write(2, 3, 0, 8, 1), std::invalid_argument);
  EXPECT_THROW(write(3, 4, 0, 8, 1), std::invalid_argument);
  EXPECT_THROW(write(3, 3, 1, 8, 1), std::invalid_argument);
  EXPECT_THROW(write(3, 4, -1, 8, 1), std::invalid_argument);
  EXPECT_THROW(write(3, 3, 0, 0, 1), std::invalid_argument);
  EXPECT_THROW(write(3, 3, 0, 8, 0), std::invalid_argument);
  EXPECT_EQ(to, std::vector<std::int64_t>(3, 7));
  write(3, 3, 0, 8, 1);
  std::ranges::sort(to);
  EXPECT_EQ(to, from);
}

TEST(Interleave, MakesRowsOfColumnsAndFindsWhatIsNotFinite) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 100; ++round) {
    const std::size_t width = 1 + (random() % 20);
    const std::size_t size = random() % 800;
    std::vector<std::vector<float>> columns(width, std::vector<float>(size));
    for (auto& column : columns)
      for (float& number : column) number = static_cast<float>(random() % 1000) - 500.0F;
    const bool is_odd = size > 0 && random() % 2 == 0;
    const float odd[] = {std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN()};
    if (is_odd) columns[random() % width][random() % size] = odd[random() % 3];
    std::vector<const float*> pointers;
    for (const auto& column : columns) pointers.push_back(column.data());
    std::vector<float> matrix(size * width);
    EXPECT_EQ(interleave(pointers, static_cast<std::int64_t>(size), matrix.data()), !is_odd);
    for (std::size_t i = 0; i < size; ++i)
      for (std::size_t c = 0; c < width; ++c)
        ASSERT_EQ(std::bit_cast<std::uint32_t>(matrix[(i * width) + c]),
                  std::bit_cast<std::uint32_t>(columns[c][i]));
  }
}

}  // namespace
}  // namespace recsdk::columns_test
