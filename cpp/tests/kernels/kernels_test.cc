// Forward kernels against plain loops, bit by bit, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernel_support.h"
#include "kernels/kernels.h"
#include "kernels/pooling.h"

namespace recsdk::kernels_test {
namespace {

using internal::kernels;
using internal::PoolArgs;
using test::bits_equal;
using test::IsaScope;
using test::kDims;
using test::random_floats;
using test::TestRows;

constexpr float kDefault = 0.375F;

/// Bags over a few rows, some of whose keys have no row and then a number that must not be used.
struct Example {
  explicit Example(std::int64_t width,
                   const std::vector<std::int64_t>& bag_sizes = {3, 0, 1, 40, 2, 0, 7},
                   std::uint32_t seed = 11)
      : dim(width), rows((width + 3) / 4 * 16, 23) {
    rows.randomize(seed, -2.0F, 2.0F);
    std::mt19937 random(seed);
    for (const std::int64_t size : bag_sizes) {
      for (std::int64_t i = 0; i < size; ++i) {
        const bool is_known = random() % 5 != 0;
        outcomes.push_back(is_known ? (random() % 2 != 0 ? Outcome::kFound : Outcome::kInserted)
                                    : (random() % 2 != 0 ? Outcome::kMissing : Outcome::kRefused));
        numbers.push_back(is_known ? static_cast<RowNumber>(random() % 23)
                                   : std::numeric_limits<RowNumber>::max());
      }
      offsets.push_back(static_cast<std::int64_t>(numbers.size()));
    }
    weights = random_floats(numbers.size(), 13, -1.0F, 2.0F);
  }

  std::int64_t num_bags() const { return static_cast<std::int64_t>(offsets.size()) - 1; }

  PoolArgs args(Pooling pooling, bool is_weighted) const {
    PoolArgs a{};
    a.addresses = rows.addresses();
    a.dim = dim;
    a.defaults.value = kDefault;
    a.rows = numbers.data();
    a.outcomes = outcomes.data();
    a.offsets = offsets.data();
    a.weights = is_weighted ? weights.data() : nullptr;
    a.pooling = pooling;
    a.bag_end = num_bags();
    a.stride = dim;
    return a;
  }

  float value(std::size_t key, std::int64_t column) const {
    return has_row(outcomes[key]) ? rows.row(numbers[key])[column] : kDefault;
  }

  std::int64_t dim;
  TestRows rows;
  std::vector<RowNumber> numbers;
  std::vector<Outcome> outcomes;
  std::vector<std::int64_t> offsets = {0};
  std::vector<float> weights;
};

/// What pool must give, by the definition and in its order of additions.
std::vector<float> pooled_plainly(const Example& example, Pooling pooling, bool is_weighted) {
  std::vector<float> out;
  for (std::size_t b = 0; b + 1 < example.offsets.size(); ++b) {
    const auto begin = static_cast<std::size_t>(example.offsets[b]);
    const auto end = static_cast<std::size_t>(example.offsets[b + 1]);
    float divisor = is_weighted ? 0.0F : static_cast<float>(end - begin);
    for (std::size_t i = begin; is_weighted && i < end; ++i) divisor += example.weights[i];
    for (std::int64_t c = 0; c < example.dim; ++c) {
      float sum = 0.0F;
      for (std::size_t i = begin; i < end; ++i) {
        sum += is_weighted ? example.weights[i] * example.value(i, c) : example.value(i, c);
      }
      if (pooling == Pooling::kMean) sum = divisor == 0.0F ? 0.0F : sum / divisor;
      out.push_back(sum);
    }
  }
  return out;
}

class OnEveryIsa : public ::testing::TestWithParam<std::string> {
 protected:
  OnEveryIsa() : scope_(GetParam()) {}

 private:
  IsaScope scope_;
};

using Pool = OnEveryIsa;
using WeightsGrad = OnEveryIsa;
using Gather = OnEveryIsa;

TEST_P(Pool, NamesItsInstructionSet) { EXPECT_EQ(kernels().isa, GetParam()); }

TEST_P(Pool, EqualsAPlainLoopBitByBit) {
  for (const std::int64_t dim : kDims) {
    const Example example(dim);
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      for (const bool is_weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "dim " << dim << " mean " << (pooling == Pooling::kMean) << is_weighted);
        std::vector<float> out(static_cast<std::size_t>(example.num_bags() * dim), NAN);
        PoolArgs args = example.args(pooling, is_weighted);
        args.out = out.data();
        kernels().pool(args);
        EXPECT_TRUE(bits_equal(out, pooled_plainly(example, pooling, is_weighted)));
      }
    }
  }
}

TEST_P(Pool, WritesOnlyItsBagsAndColumns) {
  for (const std::int64_t dim : kDims) {
    const Example example(dim);
    const std::int64_t stride = dim + 3;
    std::vector<float> out(static_cast<std::size_t>(example.num_bags() * stride), -77.0F);
    PoolArgs args = example.args(Pooling::kSum, false);
    args.bag_begin = 2;
    args.bag_end = 5;
    args.out = out.data();
    args.stride = stride;
    kernels().pool(args);
    const std::vector<float> expected = pooled_plainly(example, Pooling::kSum, false);
    for (std::int64_t b = 0; b < example.num_bags(); ++b) {
      for (std::int64_t c = 0; c < stride; ++c) {
        const bool is_written = b >= 2 && b < 5 && c < dim;
        const float want = is_written ? expected[static_cast<std::size_t>(b * dim + c)] : -77.0F;
        ASSERT_EQ(out[static_cast<std::size_t>(b * stride + c)], want)
            << "dim " << dim << " bag " << b << " column " << c;
      }
    }
  }
}

TEST_P(Pool, WithoutOffsetsEachKeyIsABag) {
  constexpr std::int64_t kBags = 90;  // more than are requested ahead
  for (const std::int64_t dim : kDims) {
    Example example(dim, std::vector<std::int64_t>(kBags, 1));
    for (std::size_t i = 0; i < static_cast<std::size_t>(kBags); i += 3) {
      if (!has_row(example.outcomes[i])) continue;
      float* const row = example.rows.row(example.numbers[i]);
      for (std::int64_t c = 0; c < dim; c += 2) row[c] = -0.0F;
    }
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      for (const bool is_weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "dim " << dim << " mean " << (pooling == Pooling::kMean) << is_weighted);
        const std::vector<float> expected = pooled_plainly(example, pooling, is_weighted);
        const std::int64_t stride = dim + 3, begin = 7, end = kBags - 4;
        std::vector<float> out(static_cast<std::size_t>(kBags * stride), -77.0F);
        PoolArgs args = example.args(pooling, is_weighted);
        args.offsets = nullptr;
        args.rows += begin;  // as a piece that is found and pooled by itself
        args.outcomes += begin;
        if (is_weighted) args.weights += begin;
        args.key_base = args.bag_begin = begin;
        args.bag_end = end;
        args.out = out.data();
        args.stride = stride;
        kernels().pool(args);
        for (std::int64_t bag = 0; bag < kBags; ++bag) {
          const bool is_done = bag >= begin && bag < end;
          std::vector<float> want(static_cast<std::size_t>(stride), -77.0F);
          if (is_done) std::copy_n(expected.begin() + bag * dim, dim, want.begin());
          const float* const got = out.data() + bag * stride;
          ASSERT_TRUE(bits_equal(std::vector<float>(got, got + stride), want)) << "bag " << bag;
        }
      }
    }
  }
}

TEST_P(Pool, WeightsThatSumToZeroGiveZeros) {
  for (const std::int64_t dim : kDims) {
    Example example(dim, {2});
    example.weights = {1.5F, -1.5F};
    std::vector<float> out(static_cast<std::size_t>(dim), NAN);
    PoolArgs args = example.args(Pooling::kMean, true);
    args.out = out.data();
    kernels().pool(args);
    EXPECT_TRUE(bits_equal(out, std::vector<float>(static_cast<std::size_t>(dim), 0.0F)))
        << "dim " << dim;
  }
}

TEST_P(Pool, NoBagsAreFine) {
  const Example example(8, {});
  PoolArgs args = example.args(Pooling::kMean, false);
  kernels().pool(args);
  args.offsets = nullptr;
  kernels().pool(args);
}

TEST_P(Gather, CopiesRowsAndDefaults) {
  for (const std::int64_t dim : kDims) {
    const Example example(dim, {40});
    std::vector<float> out(static_cast<std::size_t>(40 * dim), -77.0F);
    kernels().gather({example.rows.addresses(),
                      DType::kFloat32,
                      dim,
                      {.value = kDefault},
                      example.numbers.data(),
                      example.outcomes.data(),
                      5,
                      39,
                      out.data()});
    for (std::size_t i = 0; i < 40; ++i) {
      for (std::int64_t c = 0; c < dim; ++c) {
        const float want = i >= 5 && i < 39 ? example.value(i, c) : -77.0F;
        ASSERT_EQ(out[i * static_cast<std::size_t>(dim) + static_cast<std::size_t>(c)], want)
            << "dim " << dim << " key " << i;
      }
    }
  }
}

/// The derivative by its definition, in double.
std::vector<double> weights_grad_plainly(const Example& example, Pooling pooling, bool is_weighted,
                                         const std::vector<float>& grad) {
  std::vector<double> result(example.numbers.size());
  for (std::size_t b = 0; b + 1 < example.offsets.size(); ++b) {
    const auto begin = static_cast<std::size_t>(example.offsets[b]);
    const auto end = static_cast<std::size_t>(example.offsets[b + 1]);
    double sum_w = 0.0;
    double numerator = 0.0;  // of the mean: sum of w * dot(grad, row)
    for (std::size_t i = begin; i < end; ++i) {
      const double w = is_weighted ? static_cast<double>(example.weights[i]) : 1.0;
      for (std::int64_t c = 0; c < example.dim; ++c) {
        const auto g = static_cast<double>(
            grad[b * static_cast<std::size_t>(example.dim) + static_cast<std::size_t>(c)]);
        result[i] += g * static_cast<double>(example.value(i, c));
      }
      sum_w += w;
      numerator += w * result[i];
    }
    for (std::size_t i = begin; pooling == Pooling::kMean && i < end; ++i) {
      result[i] = (result[i] * sum_w - numerator) / (sum_w * sum_w);
    }
  }
  return result;
}

std::vector<float> weights_grad_of(const Example& example, Pooling pooling, bool is_weighted,
                                   const std::vector<float>& grad, std::int64_t stride) {
  std::vector<float> result(example.numbers.size(), NAN);
  kernels().weights_grad({example.args(pooling, is_weighted), grad.data(), stride, result.data()});
  return result;
}

TEST_P(WeightsGrad, IsTheDerivativeAndEqualOnEveryInstructionSet) {
  for (const std::int64_t dim : kDims) {
    const Example example(dim);
    const std::vector<float> grad =
        random_floats(static_cast<std::size_t>(example.num_bags() * dim), 17);
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      for (const bool is_weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "dim " << dim << " mean " << (pooling == Pooling::kMean) << is_weighted);
        const std::vector<float> result = weights_grad_of(example, pooling, is_weighted, grad, dim);
        const std::vector<double> expected =
            weights_grad_plainly(example, pooling, is_weighted, grad);
        for (std::size_t i = 0; i < result.size(); ++i) {
          ASSERT_NEAR(static_cast<double>(result[i]), expected[i], 1e-4) << "key " << i;
        }
        const IsaScope scope("baseline");
        EXPECT_TRUE(bits_equal(result, weights_grad_of(example, pooling, is_weighted, grad, dim)));
      }
    }
  }
}

TEST_P(WeightsGrad, TakesOneVectorForAllBags) {
  const Example example(5);
  const std::vector<float> grad = random_floats(5, 17);
  std::vector<float> repeated;
  for (std::int64_t b = 0; b < example.num_bags(); ++b)
    repeated.insert(repeated.end(), grad.begin(), grad.end());
  EXPECT_TRUE(bits_equal(weights_grad_of(example, Pooling::kMean, true, grad, 0),
                         weights_grad_of(example, Pooling::kMean, true, repeated, 5)));
}

TEST_P(WeightsGrad, IsZeroWhereTheWeightsSumToZero) {
  Example example(6, {2, 3});
  example.weights = {1.5F, -1.5F, 1.0F, 2.0F, 3.0F};
  const std::vector<float> grad = random_floats(12, 17);
  const std::vector<float> result = weights_grad_of(example, Pooling::kMean, true, grad, 6);
  EXPECT_EQ(result[0], 0.0F);
  EXPECT_EQ(result[1], 0.0F);
  EXPECT_NE(result[2], 0.0F);
}

TEST_P(WeightsGrad, PaddingOfTheRecordDoesNotMatter) {
  Example example(5);
  const std::vector<float> grad =
      random_floats(static_cast<std::size_t>(example.num_bags() * 5), 17);
  const std::vector<float> before = weights_grad_of(example, Pooling::kSum, true, grad, 5);
  for (std::int64_t r = 0; r < example.rows.count(); ++r) {
    for (int i = 5; i < 8; ++i) example.rows.row(r)[i] = NAN;
  }
  EXPECT_TRUE(bits_equal(before, weights_grad_of(example, Pooling::kSum, true, grad, 5)));
}

std::string isa_name(const ::testing::TestParamInfo<std::string>& param) { return param.param; }

INSTANTIATE_TEST_SUITE_P(Isa, Pool, ::testing::ValuesIn(available_isas()), isa_name);
INSTANTIATE_TEST_SUITE_P(Isa, Gather, ::testing::ValuesIn(available_isas()), isa_name);
INSTANTIATE_TEST_SUITE_P(Isa, WeightsGrad, ::testing::ValuesIn(available_isas()), isa_name);

TEST(Pooling, DivisorAndScale) {
  const std::vector<float> weights = {0.5F, 2.0F, -2.5F, 4.0F};
  EXPECT_EQ(internal::bag_divisor(Pooling::kSum, weights.data(), 0, 4), 1.0F);
  EXPECT_EQ(internal::bag_divisor(Pooling::kMean, nullptr, 0, 4), 4.0F);
  EXPECT_EQ(internal::bag_divisor(Pooling::kMean, weights.data(), 0, 4), 4.0F);
  EXPECT_EQ(internal::bag_divisor(Pooling::kMean, weights.data(), 0, 3), 0.0F);
  EXPECT_EQ(internal::bag_divisor(Pooling::kMean, nullptr, 2, 2), 0.0F);
  EXPECT_EQ(internal::gradient_scale(3.0F, 4.0F), 0.75F);
  EXPECT_EQ(internal::gradient_scale(3.0F, 0.0F), 0.0F);
}

}  // namespace
}  // namespace recsdk::kernels_test
