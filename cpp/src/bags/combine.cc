#include "recsdk/combine.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bags/check_bags.h"
#include "kernels/pooling.h"
#include "recsdk/runtime.h"
#include "util/hash.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

const internal::SeededHash& process_hash() {
  static const internal::SeededHash hash([] {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
  }());
  return hash;
}

void check(const CombineBlock& combined) {
  const GradBlock& block = combined.block;
  const auto title = [] { return std::string("combining gradients"); };
  if (block.bags.outcomes.size() != block.bags.rows.size()) {
    throw std::invalid_argument(
        title() + ": " +
        internal::must_fit_keys("outcomes", block.bags.rows.size(), block.bags.outcomes.size()));
  }
  const bool has_sums = combined.num_sums == 0 || combined.sums != nullptr;
  if (combined.num_sums < 0 || combined.width < 0 || !has_sums) {
    throw std::invalid_argument(title() + ": there are " + std::to_string(combined.num_sums) +
                                " sums of width " + std::to_string(combined.width) +
                                "; pass room for as many as there are rows");
  }
  internal::check_bags(block.bags, combined.num_sums, title, "places among the sums");
  internal::check_gradient(block, combined.width, title);
}

void add(const float* __restrict from, float scale, float* __restrict to, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) to[i] += scale * from[i];
}

void combine(const CombineBlock& combined) {
  const Bags& bags = combined.block.bags;
  const std::int64_t width = combined.width;
  // -0 + x is x, as where an update adds them up: so the first gradient is taken as it is.
  std::fill_n(combined.sums, combined.num_sums * width, -0.0F);
  const float* const weights = bags.weights.empty() ? nullptr : bags.weights.data();
  for (std::int64_t b = 0; b < bags.num_bags(); ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t begin = bags.offsets.empty() ? b : bags.offsets[at];
    const std::int64_t end = bags.offsets.empty() ? b + 1 : bags.offsets[at + 1];
    if (begin == end) continue;
    const float* const grad = combined.block.grad + b * combined.block.stride;
    const float divisor = internal::bag_divisor(bags.pooling, weights, begin, end);
    for (std::int64_t i = begin; i < end; ++i) {
      if (!has_row(bags.outcomes[static_cast<std::size_t>(i)])) continue;
      const float weight = weights == nullptr ? 1.0F : weights[i];
      add(grad, internal::gradient_scale(weight, divisor),
          combined.sums + bags.rows[static_cast<std::size_t>(i)] * width, width);
    }
  }
}

}  // namespace

std::int64_t distinct_keys(std::span<const Key> keys, std::span<Key> distinct,
                           std::span<std::int64_t> which) {
  if (distinct.size() != keys.size() || which.size() != keys.size() ||
      keys.size() >= std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument(internal::must(
        "distinct_keys: distinct and which",
        "have a place for each key, " + std::to_string(keys.size()) + ", of fewer than 2^32 - 1",
        std::to_string(distinct.size()) + " and " + std::to_string(which.size())));
  }
  // Open addressing; a slot has the number of a distinct key and 1 more, or 0.
  const std::size_t num_slots = std::bit_ceil(2 * keys.size() + 1);
  std::vector<std::uint32_t> slots(num_slots);
  const internal::SeededHash& hash = process_hash();
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::size_t at = hash(keys[i]) & (num_slots - 1);
    while (slots[at] != 0 && distinct[slots[at] - 1] != keys[i]) at = (at + 1) & (num_slots - 1);
    if (slots[at] == 0) {
      distinct[count] = keys[i];
      slots[at] = ++count;
    }
    which[i] = slots[at] - 1;
  }
  return count;
}

void combine_gradients(std::span<const CombineBlock> blocks) {
  for (const CombineBlock& block : blocks) check(block);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) combine(blocks[static_cast<std::size_t>(i)]);
  };
  internal::parallel_for(static_cast<std::int64_t>(blocks.size()), 1, num_threads(), run);
}

}  // namespace recsdk
