// The kernels' random bits and elementary functions, in the registers of the baseline.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"
#include "kernels/scalar_math.h"
#include "philox_reference.h"

namespace recsdk::internal::random_test {
namespace {

#define RECSDK_VECTOR_FLOATS 4
#define RECSDK_TILE_VECTORS 8
// In order of use, which the blank line keeps.
#include "kernels/kernels_vector.inc"

#include "kernels/kernels_math.inc"

using test::Block;
using test::philox_block;

Block kernel_block(const Block& counter, std::uint64_t stream) {
  const Words words =
      philox(counter[0], counter[1], counter[2] | std::uint64_t{counter[3]} << 32, stream);
  return {words.low[0], words.low[1], words.high[0], words.high[1]};
}

// Source: kat_vectors of Random123 1.14, philox4x32 with 10 rounds.
TEST(Philox, GivesThePublishedVectors) {
  struct Known {
    Block counter;
    std::uint64_t stream;
    Block expected;
  };
  const std::vector<Known> vectors = {
      {{0, 0, 0, 0}, 0, {0x6627E8D5U, 0xE169C58DU, 0xBC57AC4CU, 0x9B00DBD8U}},
      {{0xFFFFFFFFU, 0xFFFFFFFFU, 0xFFFFFFFFU, 0xFFFFFFFFU},
       0xFFFFFFFFFFFFFFFFU,
       {0x408F276DU, 0x41C83B0EU, 0xA20BC7C6U, 0x6D5451FDU}},
      {{0x243F6A88U, 0x85A308D3U, 0x13198A2EU, 0x03707344U},
       0x299F31D0A4093822U,
       {0xD16CFE09U, 0x94FDCCEBU, 0x5001E420U, 0x24126EA1U}},
  };
  for (const Known& known : vectors) {
    EXPECT_EQ(philox_block(known.counter, known.stream), known.expected);
    EXPECT_EQ(kernel_block(known.counter, known.stream), known.expected);
  }
}

TEST(Math, LogarithmIsWithinItsError) {
  for (std::uint32_t i = 0; i < 400000; ++i) {
    const std::uint32_t word = i * 10737U + (i % 7);
    for (const Bits& bits :
         {Bits{} + word, Bits{} + (word >> (i % 32)), Bits{} + ~(word >> (i % 32))}) {
      const float x = positive_uniform(bits)[0];
      const double exact = std::log(static_cast<double>(x));
      ASSERT_NEAR(static_cast<double>(natural_log(positive_uniform(bits))[0]), exact,
                  4e-7 * std::fabs(exact))
          << x;
    }
  }
}

TEST(Math, SineAndCosineAreWithinTheirError) {
  for (std::uint32_t i = 0; i < 400000; ++i) {
    const std::uint32_t turn = i * 10737U + (i % 7);
    const double angle = static_cast<double>(turn) * (2.0 * M_PI / 4294967296.0);
    const SineCosine value = sine_cosine(Bits{} + turn);
    ASSERT_NEAR(static_cast<double>(value.sine[0]), std::sin(angle), 2e-7) << turn;
    ASSERT_NEAR(static_cast<double>(value.cosine[0]), std::cos(angle), 2e-7) << turn;
  }
}

}  // namespace
}  // namespace recsdk::internal::random_test
