// Rows of 16 bits in the kernels against half.h and plain definitions, bit by bit and on every
// instruction set: the payload of what is not a number, subnormal and too large numbers included.
#include "kernels/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "bags/buffer.h"
#include "kernel_support.h"
#include "kernels/kernels.h"
#include "kernels/optimizer_step.h"
#include "util/hash.h"

namespace recsdk::half_test {
namespace {

using internal::kernels;
using test::bits_equal;
using test::IsaScope;
using test::TestRows;

constexpr std::int64_t kHalves = 1 << 16;
constexpr std::uint64_t kStream = 0x243F6A8885A308D3U;

std::int64_t padded_bytes(std::int64_t dim) { return (2 * dim + 15) / 16 * 16; }

/// Every 16-bit number, `dim` a row.
struct EveryHalf {
  explicit EveryHalf(std::int64_t width)
      : dim(width), rows(padded_bytes(width), (kHalves + width - 1) / width) {
    for (std::int64_t i = 0; i < kHalves; ++i) {
      const auto half = static_cast<std::uint16_t>(i);
      std::memcpy(rows.addresses().record(i / dim) + 2 * (i % dim), &half, 2);
    }
  }

  std::int64_t dim;
  TestRows rows;
};

/// Each 16-bit number, what lies half-way to the next, the floats beside these, and special ones.
std::vector<float> floats_around(DType dtype) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> floats = {0.0F, -0.0F, 65520.0F, 65536.0F, 0x1p127F, kInfinity, -kInfinity};
  for (const std::uint32_t bits : {0x00000001U, 0x807FFFFFU, 0x7F7FFFFFU, 0xFF7FFFFFU, 0x7FC00000U,
                                   0xFFFFFFFFU, 0x7FC01234U, 0xFFD55555U, 0x7F812345U})
    floats.push_back(std::bit_cast<float>(bits));
  for (std::int64_t i = 0; i < kHalves; ++i) {
    const float x = internal::widen(dtype, static_cast<std::uint16_t>(i));
    if (!std::isfinite(x)) continue;
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t halfway = dtype == DType::kBFloat16 ? 0x8000U : 0x1000U;
    for (const std::uint32_t near : {bits, bits + 1, bits + halfway - 1, bits + halfway})
      floats.push_back(std::bit_cast<float>(near));
    if (std::fabs(x) < 0x1p-14F) floats.push_back(x + std::copysign(0x1p-25F, x));
  }
  return floats;
}

/// The bits that round column `c` of a key's row, as docs/concepts/optimizers.md has them.
std::uint32_t random_half(std::uint64_t key, std::int64_t c) {
  const std::uint64_t own = internal::mix64(kStream + key * 0x9E3779B97F4A7C15U);
  auto x = static_cast<std::uint32_t>(own) + static_cast<std::uint32_t>(c / 2) * 0x9E3779B9U;
  x = ((x ^ (x >> 16)) * 0x7FEB352DU) ^ static_cast<std::uint32_t>(own >> 32);
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  x ^= x >> 16;
  return c % 2 == 0 ? x & 0xFFFFU : x >> 16;
}

/// x rounded by 16 random bits: up if they and what is left out amount to one.
std::uint16_t stochastic(DType dtype, float x, std::uint32_t random) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (!std::isfinite(x)) return internal::nearest(dtype, x);
  if (dtype == DType::kBFloat16) return static_cast<std::uint16_t>((bits + random) >> 16);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (magnitude >= 143U << 23) {
    half = 0x7C00U;
  } else if (magnitude >= 113U << 23) {
    half = (magnitude >> 13) - (112U << 10);
    half += (magnitude & 0x1FFFU) + (random >> 3) > 0x1FFFU ? 1U : 0U;
  } else {
    half =
        static_cast<std::uint32_t>(std::fabs(x) * 0x1p24F + static_cast<float>(random) * 0x1p-16F);
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// What SGD with a learning rate of 1 makes of rows of zeros and gradients -x, all halves of all
/// records: what rounding makes of x.
std::vector<std::uint16_t> updated(DType dtype, Rounding rounding, std::int64_t dim,
                                   const std::vector<float>& floats) {
  const std::int64_t count = static_cast<std::int64_t>(floats.size()) / dim;
  const TestRows rows(padded_bytes(dim), count);
  const TestRows keys(sizeof(Key), count);
  std::vector<float> grads;
  for (const float x : floats) grads.push_back(-x);
  std::vector<internal::GradItem> items;
  std::vector<internal::GradSource> sources;
  for (std::int64_t r = 0; r < count; ++r) {
    const Key key = r * 1000003 - 5;
    std::memcpy(keys.addresses().record(r), &key, sizeof(key));
    std::memset(rows.addresses().record(r), 0, static_cast<std::size_t>(padded_bytes(dim)));
    items.push_back({static_cast<std::uint32_t>(r), static_cast<std::uint32_t>(r)});
    sources.push_back({grads.data() + r * dim, 1.0F});
  }
  const OptimizerConfig sgd = OptimizerConfig::sgd(1.0F);
  const RowLayout layout = RowLayout::make(dim, sgd, dtype);
  internal::Buffer<float> scratch(internal::scratch_floats(dim, dtype));
  internal::UpdateArgs args({dim, items.data(), 0, count, sources.data(), scratch.data()},
                            rows.addresses(), dtype, {rounding, keys.addresses(), kStream},
                            internal::make_optimizer_step(sgd, layout, NonFinite::kApply, 1, 0.0));
  kernels().update(args);
  std::vector<std::uint16_t> halves(floats.size());
  for (std::int64_t r = 0; r < count; ++r) {
    std::memcpy(halves.data() + r * dim, rows.addresses().record(r),
                static_cast<std::size_t>(2 * dim));
  }
  return halves;
}

class HalfRows : public ::testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  HalfRows() : scope_(std::get<0>(GetParam())) {}
  static DType dtype() { return std::get<1>(GetParam()); }

 private:
  IsaScope scope_;
};

TEST_P(HalfRows, EveryNumberWidensAsInHalfH) {
  for (const std::int64_t dim : {1, 5, 8, 12, 64, 67}) {
    const EveryHalf every(dim);
    const std::int64_t count = every.rows.count();
    std::vector<RowNumber> numbers;
    for (RowNumber r = 0; r < count; ++r) numbers.push_back(r);
    const std::vector<Outcome> outcomes(numbers.size(), Outcome::kFound);
    std::vector<float> read(static_cast<std::size_t>(count * dim));
    kernels().gather({every.rows.addresses(),
                      dtype(),
                      dim,
                      {},
                      numbers.data(),
                      outcomes.data(),
                      0,
                      count,
                      read.data()});
    read.resize(kHalves);
    std::vector<float> expected;
    for (std::int64_t i = 0; i < kHalves; ++i)
      expected.push_back(internal::widen(dtype(), static_cast<std::uint16_t>(i)));
    EXPECT_TRUE(bits_equal(read, expected)) << "dim " << dim;
  }
}

TEST_P(HalfRows, UpdatesRoundAsDefined) {
  const std::vector<float> around = floats_around(dtype());
  for (const std::int64_t dim : {1, 5, 12, 64, 67, 131}) {
    std::vector<float> floats = around;
    floats.resize((floats.size() / static_cast<std::size_t>(dim) + 1) *
                  static_cast<std::size_t>(dim));
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
      const std::vector<std::uint16_t> made = updated(dtype(), rounding, dim, floats);
      for (std::size_t i = 0; i < floats.size(); ++i) {
        // An update negates what it takes off, but for what is not a number.
        const float x = std::isnan(floats[i]) ? -floats[i] : 0.0F - -floats[i];
        const auto row = static_cast<std::int64_t>(i) / dim;
        const std::uint32_t random = random_half(static_cast<std::uint64_t>(row * 1000003 - 5),
                                                 static_cast<std::int64_t>(i) % dim);
        const std::uint16_t expected = rounding == Rounding::kNearest
                                           ? internal::nearest(dtype(), x)
                                           : stochastic(dtype(), x, random);
        ASSERT_EQ(made[i], expected)
            << "dim " << dim << ", float " << i << ": " << std::hexfloat << x;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, HalfRows,
                         ::testing::Combine(::testing::ValuesIn(available_isas()),
                                            ::testing::Values(DType::kBFloat16, DType::kFloat16)));

}  // namespace
}  // namespace recsdk::half_test
