// Combining equal keys and their gradients, against plain loops.
#include "recsdk/combine.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "recsdk/table.h"

namespace recsdk::combine_test {
namespace {

TEST(DistinctKeys, AreInTheOrderOfFirstSight) {
  std::mt19937_64 random(1);
  for (const std::size_t size : {0U, 1U, 2U, 7U, 1000U, 5000U}) {
    for (const std::uint64_t range : {std::uint64_t{1}, std::uint64_t{9}, std::uint64_t{1} << 40}) {
      std::vector<Key> keys(size);
      for (Key& key : keys)
        key = std::numeric_limits<Key>::min() + static_cast<Key>(random() % range);
      std::vector<Key> expected;
      std::unordered_map<Key, std::int64_t> numbers;
      std::vector<std::int64_t> expected_which;
      for (const Key key : keys) {
        const auto [entry, is_new] =
            numbers.try_emplace(key, static_cast<std::int64_t>(expected.size()));
        if (is_new) expected.push_back(key);
        expected_which.push_back(entry->second);
      }
      std::vector<Key> distinct(size);
      std::vector<std::int64_t> which(size);
      const std::int64_t count = distinct_keys(keys, distinct, which);
      distinct.resize(static_cast<std::size_t>(count));
      EXPECT_EQ(distinct, expected);
      EXPECT_EQ(which, expected_which);
    }
  }
}

TEST(DistinctKeys, NeedRoom) {
  const std::vector<Key> keys = {1, 2};
  std::vector<Key> distinct(2);
  std::vector<std::int64_t> which(1);
  EXPECT_THROW(distinct_keys(keys, distinct, which), std::invalid_argument);
  which.resize(2);
  distinct.resize(1);
  EXPECT_THROW(distinct_keys(keys, distinct, which), std::invalid_argument);
}

// Whole numbers and halves, so that every order of additions gives the same bits.
TEST(CombineGradients, AddsUpWhatAnUpdateWouldApply) {
  std::mt19937_64 random(2);
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
    for (const bool is_weighted : {false, true}) {
      constexpr std::int64_t kWidth = 3;
      constexpr std::int64_t kSums = 6;
      const std::vector<std::int64_t> offsets = {0, 2, 2, 6, 7};
      std::vector<RowNumber> rows(7);
      for (RowNumber& row : rows) row = static_cast<RowNumber>(random() % (kSums - 1));
      std::vector<Outcome> outcomes(7, Outcome::kFound);
      outcomes[3] = Outcome::kMissing;
      rows[3] = 1000;
      std::vector<float> weights;
      if (is_weighted) weights = {1.0F, 3.0F, 2.0F, 1.0F, 4.0F, 1.0F, 2.0F};
      std::vector<float> grad(4 * (kWidth + 1));
      for (float& value : grad) value = static_cast<float>(random() % 64) * 4.0F;

      std::vector<float> sums(kSums * kWidth, -1.0F);
      const CombineBlock block{
          {{rows, outcomes, offsets, weights, pooling}, grad.data(), kWidth + 1, nullptr},
          kWidth,
          kSums,
          sums.data()};
      combine_gradients({&block, 1});

      std::vector<float> expected(sums.size());
      for (std::size_t bag = 0; bag < 4; ++bag) {
        const auto begin = static_cast<std::size_t>(offsets[bag]);
        const auto end = static_cast<std::size_t>(offsets[bag + 1]);
        float divisor = 0.0F;
        for (std::size_t i = begin; i < end; ++i) divisor += is_weighted ? weights[i] : 1.0F;
        if (pooling == Pooling::kSum) divisor = 1.0F;
        for (std::size_t i = begin; i < end; ++i) {
          if (outcomes[i] == Outcome::kMissing) continue;
          for (std::size_t c = 0; c < kWidth; ++c) {
            expected[static_cast<std::size_t>(rows[i]) * kWidth + c] +=
                (is_weighted ? weights[i] : 1.0F) / divisor * grad[bag * (kWidth + 1) + c];
          }
        }
      }
      EXPECT_EQ(sums, expected);
    }
  }
}

TEST(CombineGradients, KeepsTheSignOfZero) {
  const std::vector<RowNumber> rows = {0};
  const std::vector<Outcome> outcomes(1, Outcome::kFound);
  const float grad = -0.0F;
  float sum = 1.0F;
  const CombineBlock block{
      {{rows, outcomes, {}, {}, Pooling::kSum}, &grad, 1, nullptr}, 1, 1, &sum};
  combine_gradients({&block, 1});
  EXPECT_EQ(std::bit_cast<std::uint32_t>(sum), std::bit_cast<std::uint32_t>(grad));
}

TEST(CombineGradients, WhatDoesNotFitIsRefusedAndNothingIsWritten) {
  std::vector<float> sums(4, 5.0F);
  const std::vector<float> grad(8, 1.0F);
  const std::vector<Outcome> outcomes(2, Outcome::kFound);
  const std::vector<RowNumber> rows = {0, 1};
  const std::vector<RowNumber> above = {0, 2};
  const std::vector<RowNumber> below = {0, -1};
  const std::vector<std::int64_t> descending = {0, 2, 1, 2};
  const std::vector<float> weight = {1.0F};
  const std::span<const Outcome> one(outcomes.data(), 1);
  const auto block = [&](const Bags& bags, std::int64_t stride, float* to, std::int64_t num_sums) {
    return CombineBlock{{bags, grad.data(), stride, nullptr}, 2, num_sums, to};
  };
  const CombineBlock good = block({rows, outcomes, {}, {}, Pooling::kSum}, 2, sums.data(), 2);
  for (const CombineBlock& bad :
       {block({above, outcomes, {}, {}, Pooling::kSum}, 2, sums.data(), 2),
        block({below, outcomes, {}, {}, Pooling::kSum}, 2, sums.data(), 2),
        block({rows, one, {}, {}, Pooling::kSum}, 2, sums.data(), 2),
        block({rows, outcomes, descending, {}, Pooling::kSum}, 2, sums.data(), 2),
        block({rows, outcomes, {}, weight, Pooling::kSum}, 2, sums.data(), 2),
        block({rows, outcomes, {}, {}, Pooling::kSum}, 1, sums.data(), 2),
        block({rows, outcomes, {}, {}, Pooling::kSum}, 2, sums.data(), -1),
        block({rows, outcomes, {}, {}, Pooling::kSum}, 2, nullptr, 2)}) {
    const std::vector<CombineBlock> blocks = {good, bad};
    EXPECT_THROW(combine_gradients(blocks), std::invalid_argument);
  }
  EXPECT_EQ(sums, std::vector<float>(4, 5.0F));
}

}  // namespace
}  // namespace recsdk::combine_test
