// What the tests of the kernels share: rows in slabs of their exact size, so that a sanitizer sees
// any access beyond, and loops over widths and instruction sets.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "recsdk/row_layout.h"
#include "recsdk/runtime.h"

namespace recsdk::test {

/// Widths around every register width, and the usual ones.
inline constexpr std::int64_t kDims[] = {1,  2,  3,  4,  5,  7,  8,  9,  12,  15,  16,  17,
                                         20, 31, 32, 33, 47, 48, 64, 67, 100, 128, 257, 600};

/// Chooses an instruction set for a scope.
class IsaScope {
 public:
  explicit IsaScope(const std::string& name) : before_(isa()) { set_isa(name); }
  ~IsaScope() { set_isa(before_); }
  IsaScope(const IsaScope&) = delete;
  IsaScope& operator=(const IsaScope&) = delete;

 private:
  std::string before_;
};

/// Records and scalars of `count` rows in slabs of four.
class TestRows {
 public:
  TestRows(std::int64_t stride, std::int64_t count, std::int64_t scalar_stride = 0)
      : stride_(stride), scalar_stride_(scalar_stride), count_(count) {
    const std::int64_t num_slabs = (count + kSlabRows - 1) / kSlabRows;
    for (std::int64_t i = 0; i < num_slabs; ++i) {
      const auto floats = static_cast<std::size_t>(kSlabRows * (stride + scalar_stride) / 4);
      // 16-byte alignment is what new gives.
      storage_.push_back(std::make_unique<float[]>(floats));
      slabs_.push_back(reinterpret_cast<std::byte*>(storage_.back().get()));
    }
  }

  internal::RowAddresses addresses() const {
    return {slabs_.data(), 2, kSlabRows - 1, stride_, scalar_stride_, kSlabRows * stride_};
  }
  float* row(std::int64_t r) const { return reinterpret_cast<float*>(addresses().record(r)); }
  float* scalars(std::int64_t r) const { return reinterpret_cast<float*>(addresses().scalars(r)); }
  std::int64_t count() const { return count_; }

  /// Every float of every record, and the scalars.
  std::vector<float> contents() const {
    std::vector<float> all;
    for (std::int64_t r = 0; r < count_; ++r) {
      all.insert(all.end(), row(r), row(r) + stride_ / 4);
      all.insert(all.end(), scalars(r), scalars(r) + scalar_stride_ / 4);
    }
    return all;
  }

  /// Fills the records, padding too.
  void randomize(std::uint32_t seed, float low, float high) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> values(low, high);
    for (std::int64_t r = 0; r < count_; ++r) {
      for (std::int64_t i = 0; i < stride_ / 4; ++i) row(r)[i] = values(random);
    }
  }

 private:
  static constexpr std::int64_t kSlabRows = 4;
  std::int64_t stride_;
  std::int64_t scalar_stride_;
  std::int64_t count_;
  std::vector<std::unique_ptr<float[]>> storage_;
  std::vector<std::byte*> slabs_;
};

inline std::vector<float> random_floats(std::size_t n, std::uint32_t seed, float low = -1.0F,
                                        float high = 1.0F) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> values(low, high);
  std::vector<float> result(n);
  for (float& x : result) x = values(random);
  return result;
}

/// Equal bits, so that -0 differs from 0 and a NaN equals itself.
inline ::testing::AssertionResult bits_equal(const std::vector<float>& a,
                                             const std::vector<float>& b) {
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << a.size() << " floats against " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return ::testing::AssertionFailure() << "float " << i << ": " << a[i] << " against " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace recsdk::test
