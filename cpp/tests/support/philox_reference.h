// The random number generator word by word, as its paper defines it.
// Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace recsdk::test {

using Block = std::array<std::uint32_t, 4>;

/// Philox4x32-10 of a counter under the key (low half of `stream`, high half).
inline Block philox_block(Block c, std::uint64_t stream) {
  auto k0 = static_cast<std::uint32_t>(stream);
  auto k1 = static_cast<std::uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * c[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

}  // namespace recsdk::test
