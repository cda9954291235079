#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/routing.h"
#include "recsdk/runtime.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::int64_t kLengthsOfPiece = 32768;
constexpr std::size_t kLengthsOfLine = 8;
constexpr std::size_t kLengthsAhead = 32 * kLengthsOfLine;  // the processor itself looks less far

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

Seen look_at(std::span<const std::int64_t> lengths) {
  Seen seen;
  const auto look = [&](std::int64_t length) {
    const auto bits = static_cast<std::uint64_t>(length);
    seen.total += bits;
    seen.any |= bits;
    seen.other |= bits ^ 1U;
  };
  const auto look_at_line = [&](std::size_t first) {
    for (std::size_t of_line = 0; of_line < kLengthsOfLine; ++of_line)
      look(lengths[first + of_line]);
  };
  const std::size_t size = lengths.size();
  std::size_t i = 0;
  for (; i + kLengthsAhead < size; i += kLengthsOfLine) {
    internal::prefetch_line(&lengths[i + kLengthsAhead]);
    look_at_line(i);
  }
  for (; i + kLengthsOfLine <= size; i += kLengthsOfLine) look_at_line(i);
  for (; i < size; ++i) look(lengths[i]);
  return seen;
}

/// Lengths of one feature that lie side by side.
struct Piece {
  std::size_t feature;
  std::span<const std::int64_t> lengths;
  Seen seen;
};

std::vector<Piece> pieces_of(std::span<const std::int64_t> lengths,
                             std::span<const std::int64_t> num_bags) {
  std::vector<Piece> pieces;
  std::int64_t left = static_cast<std::int64_t>(lengths.size());
  std::size_t begin = 0;
  for (std::size_t feature = 0; feature < num_bags.size(); ++feature) {
    std::int64_t bags = num_bags[feature];
    if (bags < 0 || bags > left) break;
    left -= bags;
    for (; bags > 0; bags -= std::min(bags, kLengthsOfPiece)) {
      const auto count = static_cast<std::size_t>(std::min(bags, kLengthsOfPiece));
      pieces.push_back({feature, lengths.subspan(begin, count), {}});
      begin += count;
    }
  }
  if (begin != lengths.size() || std::ranges::any_of(num_bags, [](auto n) { return n < 0; }))
    throw std::invalid_argument("num_bags must not be negative and add up to the " +
                                std::to_string(lengths.size()) + " lengths");
  return pieces;
}

[[noreturn, gnu::cold]] void refuse(std::span<const std::int64_t> lengths, std::int64_t num_keys) {
  // Not as whole numbers, whose sum may overflow.
  const double sum = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  const double total = std::clamp(sum, -9e18, 9e18);
  const std::int64_t lowest = lengths.empty() ? 0 : std::ranges::min(lengths);
  throw std::invalid_argument("lengths must not be negative and add up to the " +
                              std::to_string(num_keys) + " keys, got a sum of " +
                              std::to_string(static_cast<std::int64_t>(total)) +
                              " and a least of " + std::to_string(lowest));
}

}  // namespace

FeatureCounts count_keys(std::span<const std::int64_t> lengths,
                         std::span<const std::int64_t> num_bags, std::int64_t num_keys) {
  std::vector<Piece> pieces = pieces_of(lengths, num_bags);
  internal::parallel_for(static_cast<std::int64_t>(pieces.size()), 4, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t i = begin; i < end; ++i) {
                             Piece& piece = pieces[static_cast<std::size_t>(i)];
                             piece.seen = look_at(piece.lengths);
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
  if (!fits || all.total != count) refuse(lengths, num_keys);
  return found;
}

}  // namespace recsdk
