// Sums of quantized rows are rounded once for each key, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "recsdk/runtime.h"
#include "support/frozen_tables.h"

namespace recsdk::test::serving_sums_test {
namespace {

constexpr std::int64_t kDim = 23;  // registers of 16, 8 and 4 numbers, and single ones

/// Writes the row of a key anew: every step, the scale, and a bias of 0.
void put_row(std::vector<std::byte>& file, Key key, std::byte step, float scale) {
  const std::size_t record = sizeof(Key) + kDim + 2 * sizeof(float);
  for (std::size_t at = file.size() - 2 * record; at < file.size(); at += record) {
    if (std::memcmp(&file[at], &key, sizeof(key)) != 0) continue;
    const float bias = 0.0F;
    std::fill_n(&file[at + sizeof(Key)], kDim, step);
    std::memcpy(&file[at + sizeof(Key) + kDim], &scale, sizeof(scale));
    std::memcpy(&file[at + sizeof(Key) + kDim + sizeof(scale)], &bias, sizeof(bias));
  }
}

// 205 * 5237765 is 2^30 + 1. So the second row is 2^-24 + 2^-54, of which a sum with 1 in double
// precision keeps 2^-24 only; that lies between two floats, and rounds to the even one, 1.
TEST(ServingSumsTest, AreRoundedOnceAKey) {
  const TemporaryFolder folder;
  const std::vector<float> row(kDim, 1.0F);
  const std::string path =
      freeze({{1, row}, {2, row}}, config_of(folder, kDim, FrozenDType::kInt8))[0];
  std::vector<std::byte> file = content_of(path);
  put_row(file, 1, std::byte{1}, 1.0F);
  put_row(file, 2, std::byte{205}, std::ldexp(5237765.0F, -54));
  put_content(path, file);
  const ServingTable table({&path, 1});
  const std::vector<Key> keys = {1, 2};
  const std::vector<std::int64_t> offsets = {0, 2};
  for (const std::string& name : available_isas()) {
    set_isa(name);
    for (const float sign : {1.0F, -1.0F}) {
      const std::vector<float> weights(2, sign);
      std::vector<float> out(kDim);
      table.pool({{keys, offsets, weights, Pooling::kSum}, out.data(), kDim, {}});
      for (const float x : out) ASSERT_EQ(x, sign * (1.0F + 0x1p-23F)) << name;
    }
  }
}

}  // namespace
}  // namespace recsdk::test::serving_sums_test
