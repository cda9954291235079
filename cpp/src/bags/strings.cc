#include "recsdk/strings.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>

#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5U;
constexpr std::int64_t kStripe = 32;
constexpr std::int64_t kStringsOfPiece = 8192;

template <typename Word>
std::uint64_t read(const std::uint8_t* from) {
  Word word = 0;
  std::memcpy(&word, from, sizeof(Word));
  return word;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + (word * kPrime2), 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t state, std::uint64_t lane) {
  return ((state ^ round_of(0, lane)) * kPrime1) + kPrime4;
}

/// The state after all whole stripes; `from` ends behind them.
std::uint64_t hash_stripes(const std::uint8_t*& from, const std::uint8_t* end, std::uint64_t seed) {
  std::uint64_t lane1 = seed + kPrime1 + kPrime2;
  std::uint64_t lane2 = seed + kPrime2;
  std::uint64_t lane3 = seed;
  std::uint64_t lane4 = seed - kPrime1;
  for (; end - from >= kStripe; from += kStripe) {
    lane1 = round_of(lane1, read<std::uint64_t>(from));
    lane2 = round_of(lane2, read<std::uint64_t>(from + 8));
    lane3 = round_of(lane3, read<std::uint64_t>(from + 16));
    lane4 = round_of(lane4, read<std::uint64_t>(from + 24));
  }
  const std::uint64_t state =
      std::rotl(lane1, 1) + std::rotl(lane2, 7) + std::rotl(lane3, 12) + std::rotl(lane4, 18);
  return merge(merge(merge(merge(state, lane1), lane2), lane3), lane4);
}

std::uint64_t avalanche(std::uint64_t state) {
  state = (state ^ (state >> 33)) * kPrime2;
  state = (state ^ (state >> 29)) * kPrime3;
  return state ^ (state >> 32);
}

std::uint64_t hash(const std::uint8_t* from, std::int64_t length, std::uint64_t seed) {
  const std::uint8_t* const end = from + length;
  std::uint64_t state = length >= kStripe ? hash_stripes(from, end, seed) : seed + kPrime5;
  state += static_cast<std::uint64_t>(length);
  for (; end - from >= 8; from += 8)
    state = (std::rotl(state ^ round_of(0, read<std::uint64_t>(from)), 27) * kPrime1) + kPrime4;
  if (end - from >= 4) {
    state = (std::rotl(state ^ (read<std::uint32_t>(from) * kPrime1), 23) * kPrime2) + kPrime3;
    from += 4;
  }
  for (; from != end; ++from) state = std::rotl(state ^ (*from * kPrime5), 11) * kPrime1;
  return avalanche(state);
}

void check(std::size_t num_bytes, std::span<const std::int64_t> offsets, std::size_t num_keys) {
  if (offsets.size() != num_keys + 1)
    throw std::invalid_argument(internal::must(
        "hashing strings: offsets",
        "have one element more than there are strings, " + std::to_string(num_keys + 1),
        offsets.size()));
  if (offsets.front() < 0 || offsets.back() > static_cast<std::int64_t>(num_bytes))
    throw std::invalid_argument(internal::must(
        "hashing strings: offsets", "lie within the bytes, 0 to " + std::to_string(num_bytes),
        std::to_string(offsets.front()) + " to " + std::to_string(offsets.back())));
  if (std::ranges::adjacent_find(offsets, std::greater<>()) != offsets.end())
    throw std::invalid_argument(internal::must_not_descend("hashing strings: offsets", offsets));
}

}  // namespace

void hash_strings(std::span<const std::uint8_t> bytes, std::span<const std::int64_t> offsets,
                  std::uint64_t seed, std::span<Key> keys) {
  check(bytes.size(), offsets, keys.size());
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t start = offsets[static_cast<std::size_t>(n)];
      const std::int64_t length = offsets[static_cast<std::size_t>(n) + 1] - start;
      const std::uint64_t hashed = hash(bytes.data() + start, length, seed);
      keys[static_cast<std::size_t>(n)] = static_cast<Key>(hashed);
    }
  };
  internal::parallel_for(static_cast<std::int64_t>(keys.size()), kStringsOfPiece, num_threads(),
                         piece);
}

}  // namespace recsdk
