// Packing and unpacking vectors against plain loops.
#include "recsdk/vectors.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "recsdk/runtime.h"

namespace recsdk::vectors_test {
namespace {

constexpr float kUntouched = -7.0F;
constexpr std::int32_t kNoRow = -1;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A block of a random matrix, its parts, and how many floats they take.
struct Case {
  std::int64_t num_rows, width, column, stride;
  std::vector<std::vector<std::int32_t>> rows;  // of each part
  std::vector<PackedPart> parts;
  std::int64_t packed_size = 0;

  explicit Case(std::mt19937_64& random)
      : num_rows(static_cast<std::int64_t>(random() % 40)),
        width(static_cast<std::int64_t>(random() % 70)),
        column(static_cast<std::int64_t>(random() % 3)),
        stride(width + column + static_cast<std::int64_t>(random() % 3)),
        rows(random() % 4) {
    for (std::vector<std::int32_t>& part : rows) {
      packed_size += static_cast<std::int64_t>(random() % 3);
      const bool has_all = random() % 4 == 0;
      for (std::int64_t row = 0; row < num_rows; ++row) {
        if (!has_all && random() % 2 == 0) part.push_back(static_cast<std::int32_t>(row));
      }
      if (has_all)
        parts.push_back({packed_size, nullptr, num_rows});
      else
        parts.push_back({packed_size, part.data(), static_cast<std::int64_t>(part.size())});
      if (!has_all && part.empty()) parts.back().rows = &kNoRow;  // read by nobody
      packed_size += parts.back().num_rows * width;
    }
  }

  std::int64_t row(std::size_t part, std::int64_t i) const {
    return parts[part].rows == nullptr ? i : parts[part].rows[i];
  }
};

std::vector<float> random_floats(std::mt19937_64& random, std::int64_t count) {
  std::vector<float> made(at(count));
  for (float& value : made) value = static_cast<float>(random() % 1000) / 8.0F;
  return made;
}

TEST(Vectors, UnpackAddsUpPartsInOrderAndClearsTheRest) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    const Case made(random);
    const std::vector<float> packed = random_floats(random, made.packed_size);
    std::vector<float> matrix(at(made.num_rows * made.stride + 1), kUntouched);
    std::vector<float> expected = matrix;
    for (std::int64_t r = 0; r < made.num_rows; ++r) {
      for (std::int64_t c = 0; c < made.width; ++c)
        expected[at(r * made.stride + made.column + c)] = 0.0F;
    }
    for (std::size_t p = 0; p < made.parts.size(); ++p) {
      for (std::int64_t i = 0; i < made.parts[p].num_rows; ++i) {
        for (std::int64_t c = 0; c < made.width; ++c) {
          expected[at(made.row(p, i) * made.stride + made.column + c)] +=
              packed[at(made.parts[p].start + i * made.width + c)];
        }
      }
    }
    const UnpackBlock block{matrix.data() + made.column, made.stride, made.num_rows, made.width,
                            made.parts};
    unpack_vectors(packed, {&block, 1});
    EXPECT_EQ(matrix, expected);
  }
}

TEST(Vectors, PackCopiesOrDividesAndLeavesTheRest) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const Case made(random);
    const float divisor = round % 3 == 0 ? 1.0F : 3.0F;
    const std::vector<float> matrix = random_floats(random, made.num_rows * made.stride + 1);
    std::vector<float> packed(at(made.packed_size), kUntouched);
    std::vector<float> expected = packed;
    for (std::size_t p = 0; p < made.parts.size(); ++p) {
      for (std::int64_t i = 0; i < made.parts[p].num_rows; ++i) {
        for (std::int64_t c = 0; c < made.width; ++c) {
          expected[at(made.parts[p].start + i * made.width + c)] =
              matrix[at(made.row(p, i) * made.stride + made.column + c)] / divisor;
        }
      }
    }
    const PackBlock block{matrix.data() + made.column, made.stride, made.num_rows, made.width,
                          made.parts};
    pack_vectors({&block, 1}, divisor, packed);
    EXPECT_EQ(packed, expected);
  }
}

TEST(Vectors, ManyBlocksOnManyThreadsGiveTheSame) {
  std::mt19937_64 random(3);
  constexpr std::int64_t kRows = 100;
  constexpr std::int64_t kBlocks = 50;
  const std::vector<float> packed = random_floats(random, kRows * kBlocks);
  std::vector<std::vector<PackedPart>> parts(kBlocks);
  std::vector<float> matrix(at(kRows * kBlocks));
  std::vector<UnpackBlock> blocks;
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    parts[at(b)] = {{b * kRows, nullptr, kRows}, {0, nullptr, kRows}};
    blocks.push_back({matrix.data() + b, kBlocks, kRows, 1, parts[at(b)]});
  }
  const int before = num_threads();
  set_num_threads(4);
  unpack_vectors(packed, blocks);
  set_num_threads(before);
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t b = 0; b < kBlocks; ++b)
      EXPECT_EQ(matrix[at(i * kBlocks + b)], packed[at(b * kRows + i)] + packed[at(i)]);
  }
}

TEST(Vectors, OneVectorMayStandForAllRows) {
  const std::vector<float> vector = {1.0F, 2.0F};
  std::vector<float> packed(6);
  const PackedPart part{0, nullptr, 3};
  const PackBlock block{vector.data(), 0, 3, 2, {&part, 1}};
  pack_vectors({&block, 1}, 1.0F, packed);
  EXPECT_EQ(packed, (std::vector<float>{1.0F, 2.0F, 1.0F, 2.0F, 1.0F, 2.0F}));
}

TEST(Vectors, WhatDoesNotFitIsRefusedAndNothingIsWritten) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  std::vector<float> packed(8, 1.0F);
  std::vector<float> matrix(8, 2.0F);
  const std::vector<std::int32_t> good = {0, 3};
  const std::vector<std::int32_t> above = {0, 4};
  const std::vector<std::int32_t> below = {-1, 0};
  const PackedPart fitting{0, good.data(), 2};
  for (const PackedPart& part :
       {PackedPart{5, good.data(), 2}, PackedPart{-1, good.data(), 2},
        PackedPart{9, good.data(), 0}, PackedPart{0, above.data(), 2},
        PackedPart{0, below.data(), 2}, PackedPart{0, nullptr, 3}, PackedPart{0, good.data(), -1},
        PackedPart{kHuge, nullptr, 4}, PackedPart{1, nullptr, 4}}) {
    const std::vector<PackedPart> parts = {fitting, part};
    const UnpackBlock to{matrix.data(), 2, 4, 2, parts};
    EXPECT_THROW(unpack_vectors(packed, {&to, 1}), std::invalid_argument);
    const PackBlock from{matrix.data(), 2, 4, 2, parts};
    EXPECT_THROW(pack_vectors({&from, 1}, 1.0F, packed), std::invalid_argument);
  }
  const UnpackBlock narrow{matrix.data(), 1, 4, 2, {}};
  EXPECT_THROW(unpack_vectors(packed, {&narrow, 1}), std::invalid_argument);
  EXPECT_EQ(packed, std::vector<float>(8, 1.0F));
  EXPECT_EQ(matrix, std::vector<float>(8, 2.0F));
}

}  // namespace
}  // namespace recsdk::vectors_test
