// Initial values: their distributions, and what they depend on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "bad_configs.h"
#include "kernel_support.h"
#include "kernels/kernels.h"
#include "philox_reference.h"
#include "recsdk/initializer.h"

namespace recsdk::initializer_test {
namespace {

using internal::kernels;
using test::bits_equal;
using test::IsaScope;
using test::kDims;
using test::TestRows;

constexpr std::uint64_t kTable = 0x0123456789ABCDEFU;

std::vector<float> values_of(const InitializerConfig& config, const std::vector<Key>& keys,
                             std::int64_t dim, std::uint64_t seed = 0,
                             std::uint64_t table = kTable) {
  std::vector<float> out(keys.size() * static_cast<std::size_t>(dim), NAN);
  kernels().initialize({&config,
                        seed,
                        table,
                        dim,
                        keys.data(),
                        static_cast<std::int64_t>(keys.size()),
                        {},
                        DType::kFloat32,
                        nullptr,
                        out.data()});
  return out;
}

std::vector<Key> some_keys(std::size_t n) {
  std::vector<Key> keys = {0, -1, 1, std::numeric_limits<Key>::min(),
                           std::numeric_limits<Key>::max()};
  while (keys.size() < n) keys.push_back(static_cast<Key>(keys.size() * 0x9E3779B97F4A7C15U));
  keys.resize(n);
  return keys;
}

const std::vector<InitializerConfig>& random_configs() {
  static const std::vector<InitializerConfig> configs = {
      InitializerConfig::uniform(-0.1F, 0.2F),
      InitializerConfig::normal(0.5F, 2.0F),
      InitializerConfig::truncated_normal(0.0F, 1.0F, -2.0F, 2.0F),
      InitializerConfig::truncated_normal(1.0F, 2.0F, 0.9F, 1.3F),
      InitializerConfig::truncated_normal(0.0F, 1.0F, 5.0F, 50.0F),
      InitializerConfig::truncated_normal(0.0F, 1.0F, -50.0F, -5.0F),
  };
  return configs;
}

class Initialize : public ::testing::TestWithParam<std::string> {
 protected:
  Initialize() : scope_(GetParam()) {}

 private:
  IsaScope scope_;
};

TEST_P(Initialize, ValuesDoNotDependOnTheWidth) {
  const std::vector<Key> keys = some_keys(9);
  for (const InitializerConfig& config : random_configs()) {
    const std::vector<float> wide = values_of(config, keys, 600);
    for (const std::int64_t dim : kDims) {
      const std::vector<float> narrow = values_of(config, keys, dim);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const auto begin = narrow.begin() + static_cast<std::ptrdiff_t>(i) * dim;
        const auto wide_begin = wide.begin() + static_cast<std::ptrdiff_t>(i) * 600;
        ASSERT_TRUE(bits_equal({begin, begin + dim}, {wide_begin, wide_begin + dim}))
            << "dim " << dim << " key " << i;
      }
    }
  }
}

/// FNV-1a over the bits of floats.
std::uint64_t fingerprint(const std::vector<float>& values) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (int shift = 0; shift < 32; shift += 8)
      hash = (hash ^ ((bits >> shift) & 0xFF)) * 0x100000001B3U;
  }
  return hash;
}

// A change here changes the rows of tables that are in use: whoever evicts a key and meets it
// again, or reshards, would get other values than before. The same numbers were seen on x86-64 and
// aarch64.
TEST_P(Initialize, ValuesNeverChange) {
  const std::vector<std::uint64_t> expected = {0xEFF1578B3332B6EFU, 0x68C6E24A184F0F22U,
                                               0x6BBE58EEF5BD98A6U, 0x2D10FAF968954AB4U,
                                               0xAD24A7DDE68FAAF2U, 0x37AFCE44C14FE9F2U};
  ASSERT_EQ(expected.size(), random_configs().size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::vector<float> values = values_of(random_configs()[i], some_keys(50), 100, 5);
    EXPECT_EQ(fingerprint(values), expected[i]) << std::hex << fingerprint(values);
  }
}

TEST_P(Initialize, GivesTheBitsOfTheBaseline) {
  const std::vector<Key> keys = some_keys(50);
  for (const InitializerConfig& config : random_configs()) {
    const std::vector<float> here = values_of(config, keys, 100, 5);
    const IsaScope scope("baseline");
    EXPECT_TRUE(bits_equal(here, values_of(config, keys, 100, 5)));
  }
}

TEST_P(Initialize, UniformIsWhatThePlainGeneratorGives) {
  const std::vector<Key> keys = some_keys(20);
  // The stream of seed 0 is the finalizer of SplitMix64 on its increment, its first published
  // output, and the table.
  const std::uint64_t stream = 0xE220A8397B1DCDAFU ^ kTable;
  const std::vector<float> values = values_of(InitializerConfig::uniform(0.0F, 1.0F), keys, 37);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::uint32_t c = 0; c < 37; ++c) {
      const auto key = static_cast<std::uint64_t>(keys[i]);
      const test::Block block = test::philox_block(
          {c / 4, 0, static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)},
          stream);
      ASSERT_EQ(values[i * 37 + c], static_cast<float>(block[c % 4] >> 8) * 0x1p-24F);
    }
  }
}

TEST_P(Initialize, SeedTableAndKeyEachMatter) {
  const InitializerConfig config = InitializerConfig::uniform(-1.0F, 1.0F);
  const std::vector<float> values = values_of(config, {7}, 16);
  EXPECT_FALSE(bits_equal(values, values_of(config, {8}, 16)));
  EXPECT_FALSE(bits_equal(values, values_of(config, {7 + (Key{1} << 32)}, 16)));
  EXPECT_FALSE(bits_equal(values, values_of(config, {7}, 16, 1)));
  EXPECT_FALSE(bits_equal(values, values_of(config, {7}, 16, 0, kTable + 1)));
}

TEST_P(Initialize, RecordsGetTheSameValuesAndZeroPadding) {
  const InitializerConfig config = InitializerConfig::normal(0.0F, 1.0F);
  const std::vector<Key> keys = some_keys(4);
  const std::vector<std::uint32_t> numbers = {6, 0, 3, 5};
  for (const std::int64_t dim : kDims) {
    TestRows rows((dim + 3) / 4 * 16 + 16, 7);
    rows.randomize(1, 1.0F, 2.0F);
    const std::vector<float> before = rows.contents();
    kernels().initialize({&config, 0, kTable, dim, keys.data(), 4, rows.addresses(),
                          DType::kFloat32, numbers.data(), nullptr});
    const std::vector<float> expected = values_of(config, keys, dim);
    for (std::size_t i = 0; i < 4; ++i) {
      const float* row = rows.row(numbers[i]);
      const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(i) * dim;
      EXPECT_TRUE(bits_equal({row, row + dim}, {begin, begin + dim})) << "dim " << dim;
      for (std::int64_t c = dim; c % 4 != 0; ++c) EXPECT_EQ(row[c], 0.0F);
      const std::size_t state = numbers[i] * static_cast<std::size_t>((dim + 3) / 4 * 4 + 4);
      EXPECT_EQ(row[(dim + 3) / 4 * 4],
                before[state + static_cast<std::size_t>((dim + 3) / 4 * 4)]);
    }
    EXPECT_EQ(rows.row(1)[0], before[static_cast<std::size_t>((dim + 3) / 4 * 4 + 4)]);
  }
}

TEST_P(Initialize, ConstantIsExact) {
  for (const float value : {0.0F, -0.0F, 0.1F, -3e38F}) {
    const std::vector<float> values =
        values_of(InitializerConfig::constant(value), some_keys(3), 19);
    EXPECT_TRUE(bits_equal(values, std::vector<float>(3 * 19, value)));
  }
}

TEST_P(Initialize, UniformStaysBelowHigh) {
  // Ranges in which low + (high - low) * u rounds up to high for many u.
  const std::vector<std::array<float, 2>> ranges = {{1.0F, std::nextafter(1.0F, 2.0F)},
                                                    {-1.0F, std::nextafter(-1.0F, 0.0F)},
                                                    {1.0F, 1.0F + 4 * 0x1p-23F},
                                                    {-1e-45F, 0.0F},
                                                    {0.0F, 1e-45F},
                                                    {-1e38F, 1e38F},
                                                    {100.0F, 100.001F},
                                                    {-0.0F, 0.0F},
                                                    {3.5F, 3.5F}};
  for (const auto& [low, high] : ranges) {
    for (const float value : values_of(InitializerConfig::uniform(low, high), some_keys(40), 64)) {
      ASSERT_GE(value, low);
      if (low < high) {
        ASSERT_LT(value, high) << low;
      } else {
        ASSERT_EQ(value, low);
      }
    }
  }
}

/// Greatest distance of the sample's distribution from `cdf`, times the root of its size: above 2
/// less than once in a thousand.
template <class Cdf>
double kolmogorov_distance(std::vector<float> values, const Cdf& cdf) {
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  double distance = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = cdf(static_cast<double>(values[i]));
    const auto rank = static_cast<double>(i);
    distance = std::max({distance, expected - rank / n, (rank + 1.0) / n - expected});
  }
  return distance * std::sqrt(n);
}

TEST_P(Initialize, UniformIsUniform) {
  const std::vector<float> values =
      values_of(InitializerConfig::uniform(-0.1F, 0.3F), some_keys(500), 64);
  EXPECT_LT(kolmogorov_distance(values, [](double x) { return (x + 0.1) / 0.4; }), 2.0);
}

double upper_tail(double z) { return 0.5 * std::erfc(z / std::sqrt(2.0)); }

TEST_P(Initialize, NormalIsNormalInEveryColumn) {
  const std::vector<float> values =
      values_of(InitializerConfig::normal(0.5F, 2.0F), some_keys(4000), 8);
  const auto cdf = [](double x) { return 1.0 - upper_tail((x - 0.5) / 2.0); };
  EXPECT_LT(kolmogorov_distance(values, cdf), 2.0);
  for (std::size_t c = 0; c < 8; ++c) {
    std::vector<float> column;
    for (std::size_t i = c; i < values.size(); i += 8) column.push_back(values[i]);
    EXPECT_LT(kolmogorov_distance(column, cdf), 2.0) << "column " << c;
  }
}

TEST_P(Initialize, NeighbouringColumnsAreNotCorrelated) {
  const std::vector<float> values =
      values_of(InitializerConfig::normal(0.0F, 1.0F), some_keys(5000), 4);
  for (std::size_t a = 0; a < 4; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      double product = 0.0;
      for (std::size_t i = 0; i < values.size(); i += 4)
        product += static_cast<double>(values[i + a] * values[i + b]);
      EXPECT_LT(std::fabs(product / std::sqrt(5000.0)), 4.0) << a << " " << b;
    }
  }
}

struct Window {
  float mean;
  float stddev;
  float low;
  float high;
};

// Windows for each way of drawing: wide, one-sided, narrow, and far out to both sides.
constexpr Window kWindows[] = {{0.0F, 1.0F, -2.0F, 2.0F},    {1.0F, 0.5F, 1.2F, 9.0F},
                               {0.0F, 1.0F, -0.3F, 0.4F},    {0.0F, 1.0F, 0.5F, 2.4F},
                               {2.0F, 3.0F, -8.0F, -4.0F},   {0.0F, 1.0F, 3.0F, 3.2F},
                               {0.0F, 1.0F, 4.0F, 1000.0F},  {0.0F, 1.0F, -30.0F, -6.0F},
                               {0.0F, 0.02F, -0.04F, 0.04F}, {0.0F, 1.0F, -1e30F, 1e30F}};

TEST_P(Initialize, TruncatedNormalIsWithinItsWindowAndHasItsDistribution) {
  for (const auto& [mean, stddev, low, high] : kWindows) {
    SCOPED_TRACE(::testing::Message() << "[" << low << ", " << high << "]");
    const std::vector<float> values =
        values_of(InitializerConfig::truncated_normal(mean, stddev, low, high), some_keys(500), 24);
    EXPECT_GE(*std::min_element(values.begin(), values.end()), low);
    EXPECT_LE(*std::max_element(values.begin(), values.end()), high);
    // In the tail that the window is in, lest the difference of two numbers near 1 is all that is
    // left.
    const double sign = high < mean ? -1.0 : 1.0;
    const auto tail = [&, m = static_cast<double>(mean), s = static_cast<double>(stddev)](
                          double x) { return upper_tail(sign * (x - m) / s); };
    const double at_low = tail(static_cast<double>(low));
    const double at_high = tail(static_cast<double>(high));
    const auto cdf = [&](double x) { return (at_low - tail(x)) / (at_low - at_high); };
    EXPECT_LT(kolmogorov_distance(values, cdf), 2.0);
  }
}

TEST_P(Initialize, TruncatedNormalEndsEvenWhereNothingIsLikely) {
  const std::vector<Window> extremes = {{0.0F, 1e-38F, 1.0F, 2.0F},    {0.0F, 1e-38F, -2.0F, -1.0F},
                                        {0.0F, 1e-3F, 3e38F, 3.1e38F}, {0.0F, 1.0F, 5.0F, 5.0F},
                                        {0.0F, 1.0F, -0.0F, 0.0F},     {1e30F, 1.0F, -1.0F, 1.0F},
                                        {0.0F, 1e-45F, -1.0F, 1.0F},   {0.0F, 4e37F, 1.0F, 1.5F}};
  for (const auto& [mean, stddev, low, high] : extremes) {
    const InitializerConfig config = InitializerConfig::truncated_normal(mean, stddev, low, high);
    config.validate();
    for (const float value : values_of(config, some_keys(20), 24)) {
      ASSERT_GE(value, low);
      ASSERT_LE(value, high);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Initialize, ::testing::ValuesIn(available_isas()),
                         [](const auto& param) { return param.param; });

// Source of the FNV-1a values: draft-eastlake-fnv, appendix C; the finalizer applied in this test.
TEST(TableHash, IsFnvThenAFinalizer) {
  const auto finalize = [](std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  };
  EXPECT_EQ(table_hash(""), finalize(0xCBF29CE484222325U));
  EXPECT_EQ(table_hash("a"), finalize(0xAF63DC4C8601EC8CU));
  EXPECT_EQ(table_hash("foobar"), finalize(0x85944171F73967E8U));
  EXPECT_NE(table_hash("\xC3\xA9"), table_hash("e"));
}

TEST(InitializerConfig, SaysWhatIsWrong) {
  InitializerConfig unknown;
  unknown.kind = static_cast<InitializerKind>(77);
  const std::vector<test::BadConfig<InitializerConfig>> bad = {
      {InitializerConfig::constant(NAN), "initializer: value must be finite, got nan"},
      {InitializerConfig::uniform(1.0F, 0.5F),
       "initializer: low must be at most high, got low=1, high=0.5"},
      {InitializerConfig::uniform(-INFINITY, 0.5F), "initializer: low must be finite, got -inf"},
      {InitializerConfig::uniform(-3e38F, 3e38F),
       "initializer: high - low must be finite in single precision, got low=-3.00000001e+38, "
       "high=3.00000001e+38"},
      {InitializerConfig::normal(0.0F, -1.0F), "initializer: stddev must be 0 or more, got -1"},
      {InitializerConfig::normal(NAN, 1.0F), "initializer: mean must be finite, got nan"},
      {InitializerConfig::normal(0.0F, 1e38F),
       "initializer: |mean| + 7 * stddev must be finite in single precision, got mean=0, "
       "stddev=9.99999968e+37"},
      {InitializerConfig::truncated_normal(0.0F, 0.0F, -1.0F, 1.0F),
       "initializer: stddev of a truncated normal must be above 0, got 0; or use a constant"},
      {InitializerConfig::truncated_normal(0.0F, 1.0F, 1.0F, -1.0F),
       "initializer: low must be at most high, got low=1, high=-1"},
      {InitializerConfig::custom(nullptr),
       "initializer: a custom initializer must have a callback, got none"},
      {unknown, "initializer: kind must be one of InitializerKind, got 77"},
  };
  test::expect_refused(bad);
}

TEST(InitializerConfig, AcceptsEveryEdge) {
  for (const InitializerConfig& config : random_configs()) EXPECT_NO_THROW(config.validate());
  EXPECT_NO_THROW(InitializerConfig().validate());
  EXPECT_NO_THROW(InitializerConfig::uniform(2.0F, 2.0F).validate());
  EXPECT_NO_THROW(InitializerConfig::normal(2.0F, 0.0F).validate());
  EXPECT_NO_THROW(InitializerConfig::custom([](std::span<const Key>, float*) {}).validate());
}

}  // namespace
}  // namespace recsdk::initializer_test
