// Memory for copies: what is allocated stays apart until its band is released, and is used again.
#include "cut/copy_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace recsdk::test::copy_memory_test {
namespace {

using internal::CopyMemory;

struct Piece {
  std::span<std::byte> bytes;
  std::byte content;

  bool is_whole() const {
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == content; });
  }
};

TEST(CopyMemoryTest, PiecesStayApartUntilTheirBandIsReleased) {
  constexpr std::int64_t kNumBands = 3;
  std::mt19937 random(1);
  CopyMemory memory(kNumBands);
  std::vector<std::vector<Piece>> pieces(kNumBands);
  for (int step = 0; step < 600; ++step) {
    const auto band = static_cast<std::size_t>(random() % kNumBands);
    if (random() % 40 == 0) {
      std::int64_t num_bytes = 0;
      for (const Piece& piece : pieces[band]) {
        ASSERT_TRUE(piece.is_whole());
        num_bytes += static_cast<std::int64_t>((piece.bytes.size() + 7) / 8 * 8);
      }
      ASSERT_EQ(memory.release(static_cast<std::int64_t>(band)), num_bytes);
      pieces[band].clear();
    } else if (random() % 10 == 0) {
      while (memory.stock(static_cast<std::int64_t>(random() % 2'000'000))) {
      }
    } else {
      const std::size_t head = random() % 100;
      const std::size_t each = random() % 30 == 0 ? 300'000 : 1 + random() % 500;
      const auto wanted = static_cast<std::int64_t>(1 + random() % 100);
      std::int64_t count = wanted;
      std::byte* const place = memory.allocate(static_cast<std::int64_t>(band), head, each, count);
      ASSERT_GE(count, 1);
      ASSERT_LE(count, wanted);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(place) % 8, 0U);
      const std::size_t size = head + static_cast<std::size_t>(count) * each;
      const auto content = static_cast<std::byte>(step);
      std::fill_n(place, size, content);
      pieces[band].push_back({{place, size}, content});
    }
  }
  for (const std::vector<Piece>& of_band : pieces) {
    for (const Piece& piece : of_band) ASSERT_TRUE(piece.is_whole());
  }
}

// What a limit on copies means for memory: one chunk of each band may be partly used.
TEST(CopyMemoryTest, ChunksAreFilled) {
  constexpr std::int64_t kNumBands = 4;
  constexpr std::size_t kEach = 272;
  CopyMemory memory(kNumBands);
  std::mt19937 random(2);
  std::size_t num_bytes = 0;
  std::size_t num_pieces = 0;
  for (int step = 0; step < 300; ++step) {
    const auto band = static_cast<std::int64_t>(random() % kNumBands);
    for (auto left = static_cast<std::int64_t>(1 + random() % 900); left > 0; ++num_pieces) {
      std::int64_t count = left;
      memory.allocate(band, 24, kEach, count);
      left -= count;
      num_bytes += static_cast<std::size_t>(count) * kEach;
    }
  }
  // At the end of a piece less than another row and the head are lost.
  const std::size_t most = num_bytes + num_pieces * (24 + 24 + kEach) +
                           static_cast<std::size_t>(kNumBands) * CopyMemory::kChunkBytes;
  EXPECT_LE(memory.chunk_bytes(), most);
  EXPECT_GE(memory.chunk_bytes(), num_bytes);
  const std::size_t before = memory.chunk_bytes();
  for (std::int64_t band = 0; band < kNumBands; ++band) memory.release(band);
  EXPECT_FALSE(memory.stock(static_cast<std::int64_t>(before)));  // what was released is enough
  EXPECT_EQ(memory.chunk_bytes(), before);
}

TEST(CopyMemoryTest, WhatWasReleasedComesAgain) {
  CopyMemory memory(2);
  const auto allocate = [&](std::int64_t band) {
    std::int64_t count = 1;
    return memory.allocate(band, 0, 100, count);
  };
  std::byte* const first = allocate(0);
  EXPECT_EQ(memory.release(0), 104);
  EXPECT_EQ(memory.release(0), 0);
  EXPECT_EQ(allocate(1), first);
}

// Chunks readied before or not, in one slab of 16 MiB or many: what is kept is given out again,
// each piece once.
TEST(CopyMemoryTest, RecycledItGivesOutWhatItKept) {
  constexpr std::int64_t kNumBands = 3;
  constexpr auto kChunk = static_cast<std::int64_t>(CopyMemory::kChunkBytes);
  std::mt19937 random(3);
  CopyMemory memory(kNumBands);
  for (int round = 0; round < 40; ++round) {
    std::vector<Piece> pieces;
    for (auto left = static_cast<std::int64_t>(random() % 150); left > 0; --left) {
      std::int64_t count = 200'000;
      std::byte* const place = memory.allocate(left % kNumBands, 0, 1, count);
      const auto content = static_cast<std::byte>(left);
      std::fill_n(place, count, content);
      pieces.push_back({{place, static_cast<std::size_t>(count)}, content});
    }
    memory.stock(static_cast<std::int64_t>(random() % 3) * kChunk);
    for (const Piece& piece : pieces) ASSERT_TRUE(piece.is_whole());
    const auto keep = static_cast<std::int64_t>(random() % 160) * kChunk - 1;
    const auto before = static_cast<std::int64_t>(memory.chunk_bytes());
    ASSERT_TRUE(memory.recycle(keep));
    ASSERT_EQ(static_cast<std::int64_t>(memory.chunk_bytes()),
              std::min(before, std::max<std::int64_t>(keep, 0) / kChunk * kChunk));
  }
}

}  // namespace
}  // namespace recsdk::test::copy_memory_test
