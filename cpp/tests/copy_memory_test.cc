// Memory for copies: what is allocated stays apart until its band is released, and is used again.
#include "embedding/copy_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace recsdk::test {
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
      memory.stock(static_cast<std::int64_t>(random() % 2'000'000));
    } else {
      const std::size_t size = random() % 30 == 0 ? 700'000 : 1 + random() % 20'000;
      std::byte* const place = memory.allocate(static_cast<std::int64_t>(band), size);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(place) % 8, 0U);
      const auto content = static_cast<std::byte>(step);
      std::fill_n(place, size, content);
      pieces[band].push_back({{place, size}, content});
    }
  }
  for (const std::vector<Piece>& of_band : pieces) {
    for (const Piece& piece : of_band) ASSERT_TRUE(piece.is_whole());
  }
}

TEST(CopyMemoryTest, WhatWasReleasedComesAgain) {
  CopyMemory memory(2);
  std::byte* const first = memory.allocate(0, 100);
  EXPECT_EQ(memory.release(0), 104);
  EXPECT_EQ(memory.release(0), 0);
  EXPECT_EQ(memory.allocate(1, 100), first);
}

}  // namespace
}  // namespace recsdk::test
