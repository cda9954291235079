#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "recsdk/routing.h"
#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::int64_t kLengthsOfPiece = 32768;
// Several runs of lines at once, of which the processor has more on their way than of one.
constexpr std::size_t kRuns = 4;
constexpr std::size_t kLinesAhead = 16;  // of each run; the processor itself looks less far

/// What some lengths have in common.
struct Seen {
  std::uint64_t total = 0;
  std::uint64_t any = 0;    // bits that one of them has
  std::uint64_t other = 0;  // bits in which one of them is not 1

  void add(const Seen& seen) {
    total += seen.total;
    any |= seen.any;
    other |= seen.other;
  }
};

/// The first `size` of these lengths; more of them are asked for, as they are looked at next.
template <typename Length>
Seen look_at(std::span<const Length> lengths, std::size_t size) {
  using Bits = std::make_unsigned_t<Length>;
  constexpr std::size_t kLengthsOfLine = 64 / sizeof(Length);
  constexpr std::size_t kAhead = kLinesAhead * kLengthsOfLine;
  std::uint64_t total = 0;
  Bits any = 0;
  Bits other = 0;
  const auto look = [&](Length length) {
    const auto bits = static_cast<Bits>(length);
    total += bits;
    any |= bits;
    other |= bits ^ 1U;
  };
  const auto look_at_line = [&](std::size_t first) {
    for (std::size_t of_line = 0; of_line < kLengthsOfLine; ++of_line)
      look(lengths[first + of_line]);
  };
  const std::size_t of_run = size / kRuns / kLengthsOfLine * kLengthsOfLine;
  for (std::size_t i = 0; i < of_run; i += kLengthsOfLine) {
    std::size_t ahead = i + kAhead;
    if (ahead >= of_run) ahead += size - of_run;  // in a run of the lengths that come next
    for (std::size_t begin = 0; begin < kRuns * of_run; begin += of_run) {
      if (begin + ahead < lengths.size()) internal::prefetch_far_line(&lengths[begin + ahead]);
      look_at_line(begin + i);
    }
  }
  for (std::size_t i = kRuns * of_run; i < size; ++i) look(lengths[i]);
  // A negative length has the highest bit, of whatever width.
  return {total, static_cast<std::uint64_t>(static_cast<Length>(any)), other};
}

/// Lengths of one feature that lie side by side.
struct Piece {
  std::size_t feature;
  std::size_t begin;
  std::size_t size;
  Seen seen;
};

std::vector<Piece> pieces_of(std::size_t num_lengths, std::span<const std::int64_t> num_bags) {
  std::vector<Piece> pieces;
  std::int64_t left = static_cast<std::int64_t>(num_lengths);
  std::size_t begin = 0;
  for (std::size_t feature = 0; feature < num_bags.size(); ++feature) {
    std::int64_t bags = num_bags[feature];
    if (bags < 0 || bags > left) break;
    left -= bags;
    for (; bags > 0; bags -= std::min(bags, kLengthsOfPiece)) {
      const auto size = static_cast<std::size_t>(std::min(bags, kLengthsOfPiece));
      pieces.push_back({feature, begin, size, {}});
      begin += size;
    }
  }
  if (begin != num_lengths || std::ranges::any_of(num_bags, [](auto n) { return n < 0; }))
    throw std::invalid_argument(internal::must_add_up(
        "num_bags", "add up to " + internal::counted(num_lengths, "length"), num_bags));
  return pieces;
}

template <typename Length>
[[noreturn, gnu::cold]] void refuse(std::span<const Length> lengths, std::int64_t num_keys) {
  throw std::invalid_argument(
      internal::must_add_up("lengths", "add up to " + internal::counted(num_keys, "key"), lengths));
}

template <typename Length>
FeatureCounts count(std::span<const Length> lengths, std::span<const std::int64_t> num_bags,
                    std::int64_t num_keys) {
  std::vector<Piece> pieces = pieces_of(lengths.size(), num_bags);
  internal::parallel_for(static_cast<std::int64_t>(pieces.size()), 4, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t i = begin; i < end; ++i) {
                             Piece& piece = pieces[static_cast<std::size_t>(i)];
                             piece.seen = look_at(lengths.subspan(piece.begin), piece.size);
                           }
                         });
  FeatureCounts found;
  found.num_keys.resize(num_bags.size());
  found.has_one_key_each.assign(num_bags.size(), 1);
  Seen all;
  for (const Piece& piece : pieces) {
    all.add(piece.seen);
    found.num_keys[piece.feature] += static_cast<std::int64_t>(piece.seen.total);
    if (piece.seen.other != 0) found.has_one_key_each[piece.feature] = 0;
  }
  // None above the number of keys, so that the total is right.
  const auto count = static_cast<std::uint64_t>(num_keys);
  const bool fits = all.any <= count ||
                    std::ranges::none_of(lengths, [&](auto n) { return n < 0 || n > num_keys; });
  if (num_keys < 0 || !fits || all.total != count) refuse(lengths, num_keys);
  return found;
}

}  // namespace

FeatureCounts count_keys(std::span<const std::int64_t> lengths,
                         std::span<const std::int64_t> num_bags, std::int64_t num_keys) {
  return count(lengths, num_bags, num_keys);
}

FeatureCounts count_keys(std::span<const std::int32_t> lengths,
                         std::span<const std::int64_t> num_bags, std::int64_t num_keys) {
  return count(lengths, num_bags, num_keys);
}

}  // namespace recsdk
