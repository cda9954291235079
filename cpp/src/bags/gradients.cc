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

// The digit of a row that a pass of the sort goes by.
struct Digit {
  int shift;
  std::uint32_t mask;

  std::uint32_t operator()(const GradItem& item) const { return (item.row >> shift) & mask; }
};

// How rows are cut into digits, the lowest first.
struct Digits {
  int num_passes;
  int bits;

  explicit Digits(RowNumber end_row) {
    const auto num_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(end_row - 1)));
    num_passes = (num_bits + kMostDigitBits - 1) / kMostDigitBits;
    bits = num_passes == 0 ? 0 : (num_bits + num_passes - 1) / num_passes;
  }
  std::size_t num_values() const { return std::size_t{1} << bits; }
  Digit of_pass(int pass) const {
    return {pass * bits, static_cast<std::uint32_t>(num_values()) - 1};
  }
};

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

void count_digits(std::span<const GradItem> items, Digit digit, std::uint32_t* counts) {
  for (const GradItem& item : items) ++counts[digit(item)];
}

void place_by(Digit digit, std::span<const GradItem> items, std::uint32_t* next, GradItem* to) {
  for (const GradItem& item : items) to[next[digit(item)]++] = item;
}

// One piece has the same items in all passes, so their digits are counted two at a time.
void sort_alone(Buffer<GradItem>& items, Buffer<GradItem>& other, Digits digits) {
  const std::size_t num_digits = digits.num_values();
  const auto num_passes = static_cast<std::size_t>(digits.num_passes);
  std::vector<std::uint32_t> starts(num_passes * num_digits);
  const auto starts_of = [&](int pass) {
    return std::span(starts).subspan(static_cast<std::size_t>(pass) * num_digits, num_digits);
  };
  const std::span<const GradItem> all(items.data(), static_cast<std::size_t>(items.size()));
  int pass = 0;
  for (; pass + 1 < digits.num_passes; pass += 2) {
    const Digit low = digits.of_pass(pass), high = digits.of_pass(pass + 1);
    std::uint32_t* const lows = starts_of(pass).data();
    std::uint32_t* const highs = starts_of(pass + 1).data();
    for (const GradItem& item : all) {
      ++lows[low(item)];
      ++highs[high(item)];
    }
  }
  if (pass < digits.num_passes) count_digits(all, digits.of_pass(pass), starts_of(pass).data());
  for (pass = 0; pass < digits.num_passes; ++pass) {
    make_starts(starts_of(pass), num_digits);
    place_by(digits.of_pass(pass), {items.data(), all.size()}, starts_of(pass).data(),
             other.data());
    std::swap(items, other);
  }
}

// Stable radix sort by row, least significant digit first; the same for any number of pieces.
// Why a sort: rows are then updated in ascending order of addresses, which lifts the ceiling of
// random read-modify-write by a third, at the price of a hash-based grouping; and it makes the
// order of additions fixed.
void sort_by_row(Buffer<GradItem>& items, RowNumber end_row, int max_threads) {
  const std::int64_t num_items = items.size();
  if (num_items == 0) return;
  const Digits digits(end_row);
  if (digits.num_passes == 0) return;
  Buffer<GradItem> other(num_items);
  const std::int64_t grain = std::max(kSortGrain, ceil_div(num_items, kMostPieces));
  if (max_threads == 1 || num_items <= grain) return sort_alone(items, other, digits);
  const std::size_t num_digits = digits.num_values();
  std::vector<std::uint32_t> starts(static_cast<std::size_t>(ceil_div(num_items, grain)) *
                                    num_digits);
  const auto starts_of = [&](std::int64_t begin) {
    return starts.data() + static_cast<std::size_t>(begin / grain) * num_digits;
  };
  const auto part = [&items](std::int64_t begin, std::int64_t end) {
    return std::span<const GradItem>(items.data() + begin, static_cast<std::size_t>(end - begin));
  };
  for (int pass = 0; pass < digits.num_passes; ++pass) {
    const Digit digit = digits.of_pass(pass);
    parallel_for(num_items, grain, max_threads, [&](std::int64_t begin, std::int64_t end) {
      std::fill_n(starts_of(begin), num_digits, 0);
      count_digits(part(begin, end), digit, starts_of(begin));
    });
    make_starts(starts, num_digits);
    parallel_for(num_items, grain, max_threads, [&](std::int64_t begin, std::int64_t end) {
      place_by(digit, part(begin, end), starts_of(begin), other.data());
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
  const GradItem* const all = items.data();
  std::int64_t count = static_cast<std::int64_t>(items.size() > 0);
  for (std::int64_t i = 1; i < items.size(); ++i)
    count += static_cast<std::int64_t>(all[i].row != all[i - 1].row);
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
