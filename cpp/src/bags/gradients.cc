#include "bags/gradients.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "kernels/pooling.h"
#include "recsdk/error.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

constexpr int kMostDigitBits = 11;          // more streams of stores slow each other down
constexpr std::int64_t kSortGrain = 16384;  // items of a piece, at least
constexpr std::int64_t kMostPieces = 64;
constexpr std::int64_t kBagGrain = 1024;  // bags of a piece

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Turns how often each digit occurs in each piece into where its first item goes. Items of one
// digit stand in the order of the pieces.
void make_starts(std::span<std::uint32_t> counts, std::size_t num_digits) {
  std::vector<std::uint32_t> next(num_digits);
  for (std::size_t i = 0; i < counts.size(); i += num_digits) {
    for (std::size_t d = 0; d < num_digits; ++d) next[d] += counts[i + d];
  }
  std::uint32_t sum = 0;
  for (std::uint32_t& start : next) start = std::exchange(sum, sum + start);
  for (std::size_t i = 0; i < counts.size(); i += num_digits) {
    for (std::size_t d = 0; d < num_digits; ++d) next[d] += std::exchange(counts[i + d], next[d]);
  }
}

// Stable radix sort by row, least significant digit first; the same for any number of pieces.
// Why a sort: rows are then updated in ascending order of addresses, which lifts the ceiling of
// random read-modify-write by a third, at the price of a hash-based grouping; and it makes the
// order of additions fixed.
void sort_by_row(Buffer<GradItem>& items, RowNumber end_row, int max_threads) {
  const std::int64_t num_items = items.size();
  if (num_items == 0) return;
  const auto num_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(end_row - 1)));
  const int num_passes = (num_bits + kMostDigitBits - 1) / kMostDigitBits;
  if (num_passes == 0) return;
  const int digit_bits = (num_bits + num_passes - 1) / num_passes;
  const std::size_t num_digits = std::size_t{1} << digit_bits;
  const std::uint32_t mask = static_cast<std::uint32_t>(num_digits) - 1;
  const std::int64_t grain =
      max_threads == 1 ? num_items : std::max(kSortGrain, ceil_div(num_items, kMostPieces));
  const auto num_pieces = static_cast<std::size_t>(ceil_div(num_items, grain));
  Buffer<GradItem> other(num_items);
  std::vector<std::uint32_t> starts(num_pieces * num_digits);
  for (int pass = 0; pass < num_passes; ++pass) {
    const int shift = pass * digit_bits;
    const auto digit = [shift, mask](const GradItem& item) { return (item.row >> shift) & mask; };
    const auto starts_of = [&](std::int64_t begin) {
      return starts.data() + static_cast<std::size_t>(begin / grain) * num_digits;
    };
    parallel_for(num_items, grain, max_threads, [&](std::int64_t begin, std::int64_t end) {
      std::uint32_t* const counts = starts_of(begin);
      std::fill_n(counts, num_digits, 0);
      const GradItem* const from = items.data();
      const auto digit_of = digit;  // copies that no store can alias
      for (std::int64_t i = begin; i < end; ++i) ++counts[digit_of(from[i])];
    });
    make_starts(starts, num_digits);
    parallel_for(num_items, grain, max_threads, [&](std::int64_t begin, std::int64_t end) {
      std::uint32_t* const next = starts_of(begin);
      const GradItem* const from = items.data();
      GradItem* const to = other.data();
      const auto digit_of = digit;
      for (std::int64_t i = begin; i < end; ++i) to[next[digit_of(from[i])]++] = from[i];
    });
    std::swap(items, other);
  }
}

// Some bags of a block, and where their items and sources begin among those of all blocks.
struct Piece {
  const GradBlock* block;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t num_items;
  std::int64_t num_sources;

  std::int64_t first_key(std::int64_t bag) const {
    const std::span<const std::int64_t> offsets = block->bags.offsets;
    return offsets.empty() ? bag : offsets[static_cast<std::size_t>(bag)];
  }
  std::int64_t num_keys() const { return first_key(end) - first_key(begin); }
};

bool is_wanted(Outcome outcome, GradientsOf which) {
  return has_row(outcome) == (which == GradientsOf::kOwnRows);
}

std::int64_t count_rows(const Piece& piece, GradientsOf which) {
  const Outcome* const outcomes = piece.block->bags.outcomes.data() + piece.first_key(piece.begin);
  const std::int64_t num_keys = piece.num_keys();
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < num_keys; ++i)
    count += static_cast<std::int64_t>(is_wanted(outcomes[i], which));
  return count;
}

// Where a piece's items get their gradients: one source per bag, or per key if keys have weights.
class PieceWriter {
 public:
  PieceWriter(SortedGradients& out, const Piece& piece, GradientsOf which)
      : out_(out),
        piece_(piece),
        which_(which),
        num_items_(piece.num_items),
        num_sources_(piece.num_sources) {}

  void write() {
    const GradBlock& block = *piece_.block;
    for (std::int64_t b = piece_.begin; b < piece_.end; ++b) {
      const std::int64_t begin = piece_.first_key(b);
      const std::int64_t end = piece_.first_key(b + 1);
      const float* const grad = block.grad + b * block.stride;
      if (block.bags.weights.empty()) {
        write_plain_bag(block.bags, begin, end, grad);
      } else {
        write_weighted_bag(block.bags, begin, end, grad);
      }
    }
  }

 private:
  void write_plain_bag(const Bags& bags, std::int64_t begin, std::int64_t end, const float* grad) {
    const std::int64_t source = num_sources_;
    out_.sources[num_sources_++] = {
        grad, gradient_scale(1.0F, bag_divisor(bags.pooling, nullptr, begin, end))};
    write_items(bags, begin, end, source);
  }

  void write_weighted_bag(const Bags& bags, std::int64_t begin, std::int64_t end,
                          const float* grad) {
    const float divisor = bag_divisor(bags.pooling, bags.weights.data(), begin, end);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t source = num_sources_;
      out_.sources[num_sources_++] = {
          grad, gradient_scale(bags.weights[static_cast<std::size_t>(i)], divisor)};
      write_items(bags, i, i + 1, source);
    }
  }

  // For keys [begin, end), which have one source.
  void write_items(const Bags& bags, std::int64_t begin, std::int64_t end, std::int64_t source) {
    const RowNumber* const rows = bags.rows.data();
    const Outcome* const outcomes = bags.outcomes.data();
    GradItem* next = out_.items.data() + num_items_;
    for (std::int64_t i = begin; i < end; ++i) {
      if (!is_wanted(outcomes[i], which_)) continue;
      *next++ = {static_cast<std::uint32_t>(rows[i]), static_cast<std::uint32_t>(source)};
    }
    num_items_ = next - out_.items.data();
  }

  SortedGradients& out_;
  const Piece piece_;
  const GradientsOf which_;
  std::int64_t num_items_;
  std::int64_t num_sources_;
};

std::vector<Piece> pieces_of(std::span<const GradBlock> blocks) {
  std::vector<Piece> pieces;
  for (const GradBlock& block : blocks) {
    const std::int64_t num_bags = block.bags.num_bags();
    for (std::int64_t begin = 0; begin < num_bags; begin += kBagGrain)
      pieces.push_back({&block, begin, std::min(begin + kBagGrain, num_bags), 0, 0});
  }
  return pieces;
}

}  // namespace

std::int64_t SortedGradients::row_border(std::int64_t i) const {
  if (i <= 0) return 0;
  const GradItem* const end = items.data() + items.size();
  const auto is_below = [](std::uint32_t row, const GradItem& item) { return row < item.row; };
  return std::upper_bound(items.data() + i, end, items[i - 1].row, is_below) - items.data();
}

std::int64_t SortedGradients::num_rows() const {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < items.size(); ++i)
    count += static_cast<std::int64_t>(i == 0 || items.data()[i].row != items.data()[i - 1].row);
  return count;
}

SortedGradients sort_gradients(std::span<const GradBlock> blocks, RowNumber end_row,
                               int max_threads, GradientsOf which) {
  std::vector<Piece> pieces = pieces_of(blocks);
  const auto num_pieces = static_cast<std::int64_t>(pieces.size());
  const auto for_pieces = [&](auto&& work) {
    parallel_for(num_pieces, 1, max_threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) work(pieces[static_cast<std::size_t>(i)]);
    });
  };
  for_pieces([which](Piece& piece) {
    piece.num_items = count_rows(piece, which);
    piece.num_sources =
        piece.block->bags.weights.empty() ? piece.end - piece.begin : piece.num_keys();
  });
  std::int64_t num_items = 0;
  std::int64_t num_sources = 0;
  for (Piece& piece : pieces) {
    piece.num_items = std::exchange(num_items, num_items + piece.num_items);
    piece.num_sources = std::exchange(num_sources, num_sources + piece.num_sources);
  }
  if (num_items >= std::int64_t{1} << 32 || num_sources >= std::int64_t{1} << 32) {
    throw Error(ErrorCode::kCapacity,
                "one update is limited to 2^32 keys and bags; split the batch");
  }
  SortedGradients out;
  out.items.resize(num_items);
  out.sources.resize(num_sources);
  for_pieces([&out, which](const Piece& piece) { PieceWriter(out, piece, which).write(); });
  sort_by_row(out.items, end_row, max_threads);
  return out;
}

}  // namespace recsdk::internal
