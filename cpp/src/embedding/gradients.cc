#include "embedding/gradients.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "embedding/pooling.h"
#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;

// Stable radix sort by row, least significant digit first.
// Why a sort: rows are then updated in ascending order of addresses, which lifts the ceiling of
// random read-modify-write by a third, at the price of a hash-based grouping; and it makes the
// order of additions fixed.
void sort_by_row(Buffer<GradItem>& items, RowNumber end_row) {
  Buffer<GradItem> other(items.size());
  const auto num_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(end_row)));
  for (int shift = 0; shift < num_bits; shift += kDigitBits) {
    std::array<std::uint32_t, kDigits> starts{};
    const auto digit = [shift](const GradItem& item) {
      return (item.row >> shift) & (kDigits - 1);
    };
    for (std::int64_t i = 0; i < items.size(); ++i) ++starts[digit(items[i])];
    std::uint32_t sum = 0;
    for (std::uint32_t& start : starts) start = std::exchange(sum, sum + start);
    for (std::int64_t i = 0; i < items.size(); ++i) other[starts[digit(items[i])]++] = items[i];
    std::swap(items, other);
  }
}

// Where a block's items get their gradients: one source per bag, or per key if keys have weights.
class BlockWriter {
 public:
  BlockWriter(SortedGradients& out, std::int64_t& num_items, std::int64_t& num_sources)
      : out_(out), num_items_(num_items), num_sources_(num_sources) {}

  void write(const GradBlock& block) {
    const Bags& bags = block.bags;
    for (std::int64_t b = 0; b < bags.num_bags(); ++b) {
      const std::int64_t begin =
          bags.offsets.empty() ? b : bags.offsets[static_cast<std::size_t>(b)];
      const std::int64_t end =
          bags.offsets.empty() ? b + 1 : bags.offsets[static_cast<std::size_t>(b) + 1];
      const float* const grad = block.grad + b * block.stride;
      if (bags.weights.empty()) {
        write_plain_bag(bags, begin, end, grad);
      } else {
        write_weighted_bag(bags, begin, end, grad);
      }
    }
  }

 private:
  void write_plain_bag(const Bags& bags, std::int64_t begin, std::int64_t end, const float* grad) {
    const std::int64_t source = num_sources_;
    out_.sources[num_sources_++] = {
        grad, gradient_scale(1.0F, bag_divisor(bags.pooling, nullptr, begin, end))};
    for (std::int64_t i = begin; i < end; ++i) write_item(bags, i, source);
  }

  void write_weighted_bag(const Bags& bags, std::int64_t begin, std::int64_t end,
                          const float* grad) {
    const float divisor = bag_divisor(bags.pooling, bags.weights.data(), begin, end);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t source = num_sources_;
      out_.sources[num_sources_++] = {
          grad, gradient_scale(bags.weights[static_cast<std::size_t>(i)], divisor)};
      write_item(bags, i, source);
    }
  }

  void write_item(const Bags& bags, std::int64_t i, std::int64_t source) {
    // Written always, kept only if the key has a row: no branch to mispredict.
    out_.items[num_items_] = {static_cast<std::uint32_t>(bags.rows[static_cast<std::size_t>(i)]),
                              static_cast<std::uint32_t>(source)};
    num_items_ += static_cast<std::int64_t>(has_row(bags.outcomes[static_cast<std::size_t>(i)]));
  }

  SortedGradients& out_;
  std::int64_t& num_items_;
  std::int64_t& num_sources_;
};

}  // namespace

std::int64_t SortedGradients::row_border(std::int64_t i) const {
  if (i <= 0) return 0;
  const GradItem* const end = items.data() + items.size();
  const auto is_below = [](std::uint32_t row, const GradItem& item) { return row < item.row; };
  return std::upper_bound(items.data() + i, end, items[i - 1].row, is_below) - items.data();
}

SortedGradients sort_gradients(std::span<const GradBlock> blocks, RowNumber end_row) {
  std::int64_t max_items = 0;
  std::int64_t max_sources = 0;
  for (const GradBlock& block : blocks) {
    const auto num_keys = static_cast<std::int64_t>(block.bags.rows.size());
    max_items += num_keys;
    max_sources += block.bags.weights.empty() ? block.bags.num_bags() : num_keys;
  }
  if (max_items >= std::int64_t{1} << 32 || max_sources >= std::int64_t{1} << 32) {
    throw Error(ErrorCode::kCapacity,
                "one update is limited to 2^32 keys and bags; split the batch");
  }
  SortedGradients out;
  out.items.resize(max_items + 1);  // one to spare: write_item writes before it knows
  out.sources.resize(max_sources);
  std::int64_t num_items = 0;
  std::int64_t num_sources = 0;
  BlockWriter writer(out, num_items, num_sources);
  for (const GradBlock& block : blocks) writer.write(block);
  out.items.resize(num_items);
  sort_by_row(out.items, end_row);
  return out;
}

}  // namespace recsdk::internal
