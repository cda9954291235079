#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/routing.h"
#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::size_t kBagsOfRun = 16384;  // that one thread writes before it takes others
constexpr std::int64_t kRunsAtOnce = 2;

/// Bags of one piece that lie side by side.
struct Run {
  std::size_t piece;
  std::size_t begin;  // the first bag, of the piece's
  std::size_t size;
  std::int64_t base;  // what is added to what it counts
  bool is_bad;
};

/// Adds the runs of a piece with so many bags.
void add_runs(std::vector<Run>& runs, std::size_t piece, std::size_t num_bags, std::int64_t base) {
  for (std::size_t begin = 0; begin < num_bags; begin += kBagsOfRun)
    runs.push_back({piece, begin, std::min(kBagsOfRun, num_bags - begin), base, false});
}

/// Calls body(run) for all of them, and returns whether one was found to be bad.
template <typename Body>
bool finds_bad(std::vector<Run>& runs, const Body& body) {
  internal::parallel_for(static_cast<std::int64_t>(runs.size()), kRunsAtOnce, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t i = begin; i < end; ++i)
                             body(runs[static_cast<std::size_t>(i)]);
                         });
  return std::ranges::any_of(runs, [](const Run& run) { return run.is_bad; });
}

/// Where the lengths of each feature begin, (F + 1,).
std::vector<std::size_t> begins_of(std::size_t num_lengths, std::span<const std::int64_t> num_bags,
                                   std::size_t room) {
  std::vector<std::size_t> begins{0};
  for (const std::int64_t bags : num_bags) {
    if (bags < 0 || static_cast<std::size_t>(bags) > num_lengths - begins.back()) break;
    begins.push_back(begins.back() + static_cast<std::size_t>(bags));
  }
  if (begins.size() != num_bags.size() + 1 || begins.back() != num_lengths)
    throw std::invalid_argument(internal::must_add_up(
        "num_bags", "add up to " + internal::counted(num_lengths, "length"), num_bags));
  if (room != num_lengths + num_bags.size())
    throw std::invalid_argument(internal::must(
        "offsets", "have room for " + internal::counted(num_lengths + num_bags.size(), "number"),
        room));
  return begins;
}

template <typename Length>
void lay_out(std::span<const Length> lengths, std::span<const std::int64_t> num_bags,
             std::span<std::int64_t> offsets) {
  const std::vector<std::size_t> begins = begins_of(lengths.size(), num_bags, offsets.size());
  std::vector<Run> runs;
  for (std::size_t feature = 0; feature < num_bags.size(); ++feature)
    add_runs(runs, feature, begins[feature + 1] - begins[feature], 0);
  // Sums and their signs are right if they wrap: a sum of two that fit shows it by its sign.
  const auto is_followed = [&](const Run& run) {
    return run.begin + run.size < begins[run.piece + 1] - begins[run.piece];
  };
  const auto lengths_of = [&](const Run& run) {
    return lengths.subspan(begins[run.piece] + run.begin, run.size);
  };
  if (std::ranges::any_of(runs, is_followed)) {
    finds_bad(runs, [&](Run& run) {
      if (!is_followed(run)) return;
      std::uint64_t sum = 0;
      for (const Length length : lengths_of(run)) sum += static_cast<std::uint64_t>(length);
      run.base = static_cast<std::int64_t>(sum);
    });
    std::uint64_t sum = 0;
    for (Run& run : runs) {
      if (run.begin == 0) sum = 0;
      const auto own = static_cast<std::uint64_t>(run.base);
      run.base = static_cast<std::int64_t>(sum);
      sum += own;
    }
  }
  for (std::size_t feature = 0; feature < num_bags.size(); ++feature)
    offsets[begins[feature] + feature] = 0;
  const bool is_bad = finds_bad(runs, [&](Run& run) {
    std::int64_t* next = &offsets[begins[run.piece] + run.piece + run.begin + 1];
    auto end = static_cast<std::uint64_t>(run.base);
    std::uint64_t signs = end;
    for (const Length length : lengths_of(run)) {
      const auto own = static_cast<std::uint64_t>(static_cast<std::int64_t>(length));
      end += own;
      signs |= own | end;
      *next++ = static_cast<std::int64_t>(end);
    }
    run.is_bad = static_cast<std::int64_t>(signs) < 0;
  });
  if (is_bad)
    throw std::invalid_argument(
        internal::must_add_up("lengths", "add up to less than 2^63 for each feature", lengths));
}

std::size_t num_bags_of(const BagPiece& piece) {
  return piece.offsets.empty() ? static_cast<std::size_t>(piece.num_keys)
                               : piece.offsets.size() - 1;
}

/// Throws unless pieces fit into numbers up to `most`, and `room` is theirs.
void check_pieces(std::span<const BagPiece> pieces, std::int64_t most, std::size_t room) {
  std::int64_t num_keys = 0;
  std::size_t num_bags = 0;
  for (const BagPiece& piece : pieces) {
    const auto& [offsets, count] = piece;
    if (count < 0 || (!offsets.empty() && (offsets.front() != 0 || offsets.back() != count)))
      throw std::invalid_argument(internal::must(
          "offsets", "run from 0 to the number of their keys, " + std::to_string(count),
          offsets.empty()
              ? "none"
              : std::to_string(offsets.front()) + " to " + std::to_string(offsets.back())));
    if (count > most - num_keys)
      throw std::invalid_argument(internal::must(
          "out", "be int64 for more than " + std::to_string(most) + " keys",
          "narrower numbers for " + std::to_string(num_keys) + " and " + std::to_string(count)));
    num_keys += count;
    num_bags += num_bags_of(piece);
  }
  if (room != num_bags + 1)
    throw std::invalid_argument(
        internal::must("out", "have room for " + internal::counted(num_bags + 1, "offset"), room));
}

/// The runs of pieces that were checked.
std::vector<Run> runs_of(std::span<const BagPiece> pieces) {
  std::vector<Run> runs;
  std::int64_t num_keys = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    add_runs(runs, i, num_bags_of(pieces[i]), num_keys);
    num_keys += pieces[i].num_keys;
  }
  return runs;
}

template <typename Number>
void join(std::span<const BagPiece> pieces, std::span<Number> joined) {
  check_pieces(pieces, std::numeric_limits<Number>::max(), joined.size());
  std::vector<Run> runs = runs_of(pieces);
  std::vector<Number*> firsts;  // where each piece's first bag ends
  Number* next = joined.data() + 1;
  for (const BagPiece& piece : pieces) {
    firsts.push_back(next);
    next += num_bags_of(piece);
  }
  joined.front() = 0;
  const bool is_bad = finds_bad(runs, [&](Run& run) {
    Number* const out = firsts[run.piece] + run.begin;
    const std::span<const std::int64_t> offsets = pieces[run.piece].offsets;
    if (offsets.empty()) {
      const auto first = run.base + static_cast<std::int64_t>(run.begin) + 1;
      for (std::size_t i = 0; i < run.size; ++i)
        out[i] = static_cast<Number>(first + static_cast<std::int64_t>(i));
      return;
    }
    const std::int64_t* const begins = &offsets[run.begin];
    std::uint64_t signs = 0;
    for (std::size_t i = 0; i < run.size; ++i) {
      const auto end = static_cast<std::uint64_t>(begins[i + 1]);
      signs |= end | (end - static_cast<std::uint64_t>(begins[i]));
      out[i] = static_cast<Number>(static_cast<std::uint64_t>(run.base) + end);
    }
    run.is_bad = static_cast<std::int64_t>(signs) < 0;
  });
  if (!is_bad) return;
  const auto wrong = std::ranges::find_if(runs, &Run::is_bad);
  throw std::invalid_argument(internal::must_not_descend("offsets", pieces[wrong->piece].offsets));
}

}  // namespace

void lay_out_offsets(std::span<const std::int64_t> lengths, std::span<const std::int64_t> num_bags,
                     std::span<std::int64_t> offsets) {
  lay_out(lengths, num_bags, offsets);
}

void lay_out_offsets(std::span<const std::int32_t> lengths, std::span<const std::int64_t> num_bags,
                     std::span<std::int64_t> offsets) {
  lay_out(lengths, num_bags, offsets);
}

void join_offsets(std::span<const BagPiece> pieces, std::span<std::int32_t> out) {
  join(pieces, out);
}

void join_offsets(std::span<const BagPiece> pieces, std::span<std::int64_t> out) {
  join(pieces, out);
}

}  // namespace recsdk
