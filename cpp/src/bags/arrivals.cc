// How what a BagCutter wrote for one shard is read where it arrives.
#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "bags/travelling_lengths.h"
#include "recsdk/routing.h"
#include "util/must.h"

namespace recsdk {

using internal::at;
using internal::kWordBytes;
using internal::Lengths;
using internal::with_length;
using internal::words_of_lengths;

namespace {

[[noreturn]] void reject(std::span<const std::int64_t> words, std::int64_t num_features,
                         const std::string& what) {
  throw std::invalid_argument("reading a batch of " + std::to_string(num_features) +
                              " features from " + std::to_string(words.size()) + " words: " + what);
}

/// What the lengths of some bags add up to.
struct LengthSums {
  std::uint64_t num_keys = 0;
  std::uint64_t num_filled = 0;
  std::uint64_t longest = 0;
};

template <typename Length>
LengthSums sums_of(const Lengths<Length>& lengths, std::int64_t begin, std::int64_t end) {
  using Sum = std::conditional_t<sizeof(Length) <= 2, std::uint32_t, std::uint64_t>;
  constexpr std::int64_t kBlock = 1 << 15;  // of which a sum of the longest bags fits
  LengthSums found;
  for (std::int64_t first = begin; first < end; first += kBlock) {
    const std::int64_t last = std::min(end, first + kBlock);
    Sum num_keys = 0;
    Sum num_filled = 0;
    Length longest = 0;
    for (std::int64_t bag = first; bag < last; ++bag) {
      const Length length = lengths[bag];
      num_keys += length;
      num_filled += static_cast<Sum>(length > 0);
      longest = std::max(longest, length);
    }
    found.num_keys += num_keys;
    found.num_filled += num_filled;
    found.longest = std::max(found.longest, static_cast<std::uint64_t>(longest));
  }
  return found;
}

/// Counts the keys of each feature, and its bags that have some.
template <typename Length>
void count_arrived(std::span<const std::int64_t> words, std::int64_t num_features,
                   ArrivedBags& found) {
  const auto size = static_cast<std::uint64_t>(words.size());
  const Lengths<Length> lengths(words.data() + num_features + 1);
  std::int64_t bag = 0;
  for (const std::int64_t count : words.first(at(num_features))) {
    const LengthSums sums = sums_of(lengths, bag, bag + count);
    bag += count;
    if (sums.longest > size || sums.num_keys > size)  // sums of such lengths do not overflow
      reject(words, num_features,
             "a bag of " + std::to_string(sums.longest) + " keys does not fit");
    found.num_keys.push_back(static_cast<std::int64_t>(sums.num_keys));
    found.num_filled.push_back(static_cast<std::int64_t>(sums.num_filled));
  }
}

}  // namespace

ArrivedBags read_bags(std::span<const std::int64_t> words, std::int64_t num_features,
                      bool every_key_is_a_bag) {
  const auto size = static_cast<std::int64_t>(words.size());
  if (num_features < 0 || num_features > size)
    reject(words, num_features, "the numbers of bags are not all there");
  ArrivedBags found;
  found.num_words = num_features;
  const auto num_bags = words.first(at(num_features));
  const std::int64_t room = (size - num_features) * kWordBytes;
  std::int64_t num_all_bags = 0;
  for (const std::int64_t count : num_bags) {
    if (count < 0 || count > room - num_all_bags)
      reject(words, num_features, std::to_string(count) + " bags do not fit");
    num_all_bags += count;
  }
  if (every_key_is_a_bag) {
    found.num_keys.assign(num_bags.begin(), num_bags.end());
    found.num_filled = found.num_keys;
  } else {
    if (num_features == size) reject(words, num_features, "the size of lengths is not there");
    const std::int64_t bytes = words[at(num_features)];
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8)
      reject(words, num_features,
             "a length takes 1, 2, 4 or 8 bytes, not " + std::to_string(bytes));
    found.length_bytes = bytes;
    found.num_words += 1 + words_of_lengths(num_all_bags, bytes);
    if (found.num_words > size)
      reject(words, num_features, std::to_string(num_all_bags) + " bags do not fit");
    with_length(bytes,
                [&](auto length) { count_arrived<decltype(length)>(words, num_features, found); });
  }
  for (const std::int64_t count : found.num_keys) {
    if (count > size - found.num_words) reject(words, num_features, "the keys are not all there");
    found.num_words += count;
  }
  return found;
}

void write_offsets(std::span<const std::int64_t> words, const ArrivedBags& arrived,
                   std::span<std::int64_t> offsets) {
  const auto num_features = static_cast<std::int64_t>(arrived.num_filled.size());
  std::size_t wanted = arrived.num_filled.size();
  for (const std::int64_t count : arrived.num_filled) wanted += at(count);
  if (offsets.size() != wanted)
    throw std::invalid_argument(
        "write_offsets: " +
        internal::must("offsets", "have " + std::to_string(wanted) + " elements", offsets.size()));
  with_length(arrived.length_bytes, [&](auto type) {
    const Lengths<decltype(type)> lengths(words.data() + num_features + 1);
    std::int64_t bag = 0;
    std::int64_t* next = offsets.data();
    for (std::int64_t feature = 0; feature < num_features; ++feature) {
      *next++ = 0;
      std::int64_t end = 0;
      const std::int64_t bags_end = bag + words[at(feature)];
      std::int64_t* const after = next + arrived.num_filled[at(feature)];
      for (; bag < bags_end && next < after; ++bag) {
        const auto length = static_cast<std::int64_t>(lengths[bag]);
        end += length;
        *next = end;
        next += static_cast<std::int64_t>(length > 0);
      }
      bag = bags_end;  // empty bags after the last that has keys
    }
  });
}

}  // namespace recsdk
