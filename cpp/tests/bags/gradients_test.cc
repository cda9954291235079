// The list of row gradients that an update works on.
#include "bags/gradients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

namespace recsdk::internal::gradients_test {
namespace {

struct Flat {
  std::uint32_t row;
  const float* grad;
  float scale;
  bool operator==(const Flat&) const = default;
};

std::vector<Flat> flatten(const SortedGradients& gradients) {
  std::vector<Flat> flat;
  for (std::int64_t i = 0; i < gradients.items.size(); ++i) {
    const GradSource& source = gradients.sources[gradients.items[i].source];
    flat.push_back({gradients.items[i].row, source.grad, source.scale});
  }
  return flat;
}

class Gradients : public testing::TestWithParam<std::tuple<RowNumber, std::size_t, int>> {};

TEST_P(Gradients, AreSortedByRowAndKeepInputOrderWithinARow) {
  std::mt19937_64 random(3);
  const auto [end_row, num_keys, num_threads] = GetParam();
  std::vector<RowNumber> rows(num_keys);
  std::vector<Outcome> outcomes(rows.size());
  std::vector<float> weights(rows.size());
  std::vector<std::int64_t> offsets = {0};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto spread =
        static_cast<std::uint64_t>(random() % 2 == 0 ? end_row : std::min<RowNumber>(end_row, 500));
    rows[i] = end_row - 1 - static_cast<RowNumber>(random() % spread);
    outcomes[i] = random() % 10 == 0 ? Outcome::kRefused : Outcome::kFound;
    weights[i] = static_cast<float>(random() % 8);
  }
  while (std::cmp_less(offsets.back(), num_keys))
    offsets.push_back(std::min(static_cast<std::int64_t>(num_keys),
                               offsets.back() + static_cast<std::int64_t>(random() % 6)));
  const auto num_bags = static_cast<std::int64_t>(offsets.size()) - 1;
  std::vector<float> grad(static_cast<std::size_t>(num_bags) * 2);
  const GradBlock plain{{rows, outcomes, offsets, {}, Pooling::kMean}, grad.data(), 2, nullptr};
  const GradBlock weighted{
      {rows, outcomes, offsets, weights, Pooling::kSum}, grad.data(), 2, nullptr};
  const std::vector<GradBlock> blocks = {plain, weighted};

  std::vector<Flat> expected;
  for (int block = 0; block < 2; ++block) {
    for (std::int64_t b = 0; b < num_bags; ++b) {
      const auto bag = static_cast<std::size_t>(b);
      for (auto i = static_cast<std::size_t>(offsets[bag]);
           i < static_cast<std::size_t>(offsets[bag + 1]); ++i) {
        if (!has_row(outcomes[i])) continue;
        const float scale =
            block == 0 ? 1.0F / static_cast<float>(offsets[bag + 1] - offsets[bag]) : weights[i];
        expected.push_back({static_cast<std::uint32_t>(rows[i]), grad.data() + b * 2, scale});
      }
    }
  }
  std::stable_sort(expected.begin(), expected.end(),
                   [](const Flat& a, const Flat& b) { return a.row < b.row; });
  const SortedGradients gradients = sort_gradients(blocks, end_row, num_threads);
  EXPECT_EQ(flatten(gradients), expected);
  for (std::int64_t i = 0; i <= gradients.items.size(); i += 97) {
    const std::int64_t border = gradients.row_border(i);
    EXPECT_TRUE(border == 0 || border == gradients.items.size() ||
                gradients.items[border].row != gradients.items[border - 1].row);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Gradients,
                         testing::Combine(testing::Values(RowNumber{1}, RowNumber{2}, RowNumber{7},
                                                          RowNumber{2048}, RowNumber{2049},
                                                          RowNumber{1} << 22, RowNumber{1} << 32),
                                          testing::Values(std::size_t{3000}, std::size_t{70'000}),
                                          testing::Values(1, 3)));

TEST(NoGradients, AreSorted) {
  EXPECT_EQ(sort_gradients({}, 0, 2).items.size(), 0);
  const std::vector<std::int64_t> offsets = {0, 0, 0};
  const float grad[4] = {};
  const GradBlock block{{{}, {}, offsets, {}, Pooling::kMean}, grad, 2, nullptr};
  EXPECT_EQ(sort_gradients({&block, 1}, 10, 2).items.size(), 0);
}

}  // namespace
}  // namespace recsdk::internal::gradients_test
