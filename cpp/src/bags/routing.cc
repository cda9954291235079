// How a batch is cut by the shard of each key. How it is read where it arrives is in arrivals.cc.
#include "recsdk/routing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bags/travelling_lengths.h"
#include "kernels/kernels.h"
#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::at;
using internal::with_length;
using internal::words_of_lengths;
using internal::WrittenLengths;

namespace {

constexpr std::int64_t kBagsOfPiece = 4096;
// Looking at each shard after each bag pays if bags have so many keys of each; and not of more.
constexpr std::int64_t kKeysOfShard = 2;
constexpr std::int64_t kFewShards = 16;
constexpr std::int64_t kMostBags = std::numeric_limits<std::int32_t>::max();  // of a feature

std::int64_t sum(std::span<const std::int64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

/// How many bytes a length takes that has no more bits than `longest`.
std::int64_t bytes_for(std::int64_t longest) {
  if (longest <= std::numeric_limits<std::uint8_t>::max()) return 1;
  if (longest <= std::numeric_limits<std::uint16_t>::max()) return 2;
  return longest <= std::numeric_limits<std::uint32_t>::max() ? 4 : 8;
}

// ---- what is refused ----------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("cutting a batch by shards: " + what);
}

[[noreturn]] void refuse_sum(const char* name, std::int64_t wanted, const char* what,
                             std::span<const std::int64_t> numbers) {
  refuse(internal::must_add_up(name, "add up to " + internal::counted(wanted, what), numbers));
}

[[noreturn]] void refuse_bags(const char* name, std::int64_t got) {
  refuse(internal::must(name, "be at most " + std::to_string(kMostBags), got) +
         "; split the batch");
}

std::string numbers_of(std::int64_t words, std::int64_t places, std::int64_t filled) {
  return std::to_string(words) + ", " + std::to_string(places) + " and " + std::to_string(filled);
}

/// What the lengths of a batch's bags have in common.
struct LengthBits {
  std::int64_t any = 0;  // bits that some length has: as many as the longest
  bool are_all_one = true;
};

LengthBits read_lengths(std::span<const std::int64_t> lengths, std::int64_t num_keys) {
  std::uint64_t any = 0;
  std::uint64_t every = 1;
  std::uint64_t total = 0;
  for (const std::int64_t length : lengths) {
    const auto bits = static_cast<std::uint64_t>(length);
    any |= bits;
    every &= bits;
    total += bits;
  }
  // None above the number of keys, so that the total is right.
  if (any > static_cast<std::uint64_t>(num_keys) &&
      std::ranges::any_of(lengths, [&](auto n) { return n < 0 || n > num_keys; }))
    refuse_sum("lengths", num_keys, "key", lengths);
  if (total != static_cast<std::uint64_t>(num_keys))
    refuse_sum("lengths", num_keys, "key", lengths);
  return {static_cast<std::int64_t>(any), any <= 1 && every == 1};
}

LengthBits check(const FeatureBatch& batch, std::int64_t num_shards,
                 std::int64_t num_virtual_shards) {
  if (num_shards < 1 || num_shards > kNumVirtualShards)
    refuse(internal::must("num_shards", "be 1 to 65536", num_shards));
  if (num_virtual_shards < 1 || num_virtual_shards > kNumVirtualShards ||
      !std::has_single_bit(static_cast<std::uint64_t>(num_virtual_shards)))
    refuse(
        internal::must("num_virtual_shards", "be a power of two up to 65536", num_virtual_shards));
  const auto num_keys = static_cast<std::int64_t>(batch.keys.size());
  const auto num_lengths = static_cast<std::int64_t>(batch.lengths.size());
  const std::int64_t wanted = batch.every_key_is_a_bag ? num_keys : num_lengths;
  // None above the total, so that sums do not overflow.
  if (std::ranges::any_of(batch.num_bags, [&](auto n) { return n < 0 || n > wanted; }))
    refuse_sum("num_bags", wanted, "bag", batch.num_bags);
  if (std::ranges::any_of(batch.num_bags, [](auto n) { return n > kMostBags; }))
    refuse_bags("the bags of a feature", std::ranges::max(batch.num_bags));
  if (sum(batch.num_bags) != wanted) refuse_sum("num_bags", wanted, "bag", batch.num_bags);
  return batch.every_key_is_a_bag ? LengthBits{} : read_lengths(batch.lengths, num_keys);
}

// ---- owners -------------------------------------------------------------------------------------

/// Writes the owner of each key.
void find_owners(std::span<const Key> keys, std::span<std::uint16_t> owners,
                 std::int64_t num_shards, OwnerRule rule, int bits) {
  const auto count = static_cast<std::uint64_t>(num_shards);
  if (rule == OwnerRule::kVirtualShard) {
    const auto num_keys = static_cast<std::int64_t>(keys.size());
    internal::kernels().owners({keys.data(), num_keys, count, bits, owners.data()});
    return;
  }
  for (std::size_t i = 0; i < keys.size(); ++i)
    owners[i] = static_cast<std::uint16_t>(static_cast<std::uint64_t>(keys[i]) % count);
}

/// How many of two owners, 0 and 1, are the second: four are added at once.
std::int64_t count_seconds(std::span<const std::uint16_t> owners) {
  constexpr std::size_t kAtOnce = sizeof(std::uint64_t) / sizeof(std::uint16_t);
  constexpr std::size_t kMost = 16'383 * kAtOnce;  // whose sum has 16 bits
  constexpr std::uint64_t kSumsToHighest = 0x0001'0001'0001'0001U;
  std::uint64_t seconds = 0;
  std::size_t i = 0;
  while (i + kAtOnce <= owners.size()) {
    const std::size_t end = i + std::min(owners.size() - i, kMost) / kAtOnce * kAtOnce;
    std::uint64_t sums = 0;
    for (; i < end; i += kAtOnce) {
      std::uint64_t four;
      std::memcpy(&four, &owners[i], sizeof(four));
      sums += four;
    }
    seconds += (sums * kSumsToHighest) >> 48U;
  }
  for (; i < owners.size(); ++i) seconds += owners[i];
  return static_cast<std::int64_t>(seconds);
}

/// Adds to how many keys each owner has.
void count_owners(std::span<const std::uint16_t> owners, std::int64_t num_shards,
                  std::int64_t* counts) {
  if (num_shards == 2) {  // a count for each owner would wait for the one before
    const std::int64_t seconds = count_seconds(owners);
    counts[0] += static_cast<std::int64_t>(owners.size()) - seconds;
    counts[1] += seconds;
    return;
  }
  for (const std::uint16_t owner : owners) ++counts[owner];
}

/// Writes numbers from `begin` on, one for each owner, to where two shards go on. Which shard has a
/// number decides no branch, and no place waits for the one before it.
void deal_to_two(std::span<const std::uint16_t> owners, std::int64_t begin, std::int64_t* first,
                 const std::int64_t* second) {
  const std::int64_t gap = second - first;
  std::int64_t num_second = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(owners.size()); ++i) {
    const std::int64_t owner = owners[at(i)];
    const std::int64_t of_first = i - num_second;
    first[of_first + ((num_second + gap - of_first) & -owner)] = begin + i;
    num_second += owner;
  }
}

/// Writes numbers from `begin` on, one for each owner, to where its shard goes on, (W,).
void deal_numbers(std::span<const std::uint16_t> owners, std::int64_t begin,
                  std::int64_t num_shards, std::int64_t** next) {
  if (num_shards == 2) {
    deal_to_two(owners, begin, next[0], next[1]);
    return;
  }
  for (const std::uint16_t owner : owners) *next[owner]++ = begin++;
}

/// Writes keys to where the shards of their owners go on, (W,).
void deal_keys(std::span<const Key> keys, std::span<const std::uint16_t> owners,
               std::int64_t num_shards, Key** next) {
  if (num_shards == 2) {
    const auto num_keys = static_cast<std::int64_t>(keys.size());
    internal::kernels().deal(
        {keys.data(), owners.data(), num_keys, 0, {next[0], next[1]}, {nullptr, nullptr}});
    return;
  }
  for (std::size_t i = 0; i < keys.size(); ++i) *next[owners[i]]++ = keys[i];
}

}  // namespace

/// Where a piece writes next, for each shard.
struct BagCutter::Heads {
  std::span<std::int64_t> words;
  std::span<std::int64_t> places;
  std::span<std::int32_t> filled;
  bool in_batch;                         // whether bags are counted within all features
  std::vector<std::int64_t> first_word;  // (W,)
  std::vector<std::int64_t> keys;        // (pieces, W), within the shard's keys
  std::vector<std::int64_t> fills;       // (pieces, W), among all
  std::vector<std::int64_t> first_key;   // (W,), among the keys of all shards
};

BagCutter::BagCutter(const FeatureBatch& batch, std::int64_t num_shards, OwnerRule rule,
                     std::int64_t num_virtual_shards)
    : batch_(batch), num_shards_(num_shards), rule_(rule) {
  const LengthBits lengths = check(batch_, num_shards_, num_virtual_shards);
  virtual_shard_bits_ = std::countr_zero(static_cast<std::uint64_t>(num_virtual_shards));
  length_bytes_ = bytes_for(lengths.any);
  has_single_keys_ = lengths.are_all_one;
  const auto num_keys = static_cast<std::int64_t>(batch_.keys.size());
  const auto num_bags = static_cast<std::int64_t>(batch_.lengths.size());
  goes_by_bag_ = num_shards_ == 1 ||
                 (num_shards_ <= kFewShards && num_keys / kKeysOfShard / num_shards_ >= num_bags);
  make_pieces();
  const auto num_pieces = static_cast<std::int64_t>(piece_feature_.size());
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  if (num_shards_ > 1)
    owners_ = std::make_unique_for_overwrite<std::uint16_t[]>(batch_.keys.size());
  piece_keys_.assign(at(num_pieces * num_shards_), 0);
  piece_filled_.assign(at(num_pieces * num_shards_), 0);
  internal::parallel_for(num_pieces, 1, num_threads(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) count_piece(piece);
  });
  num_keys_.assign(at(num_shards_), 0);
  num_filled_.assign(at(num_shards_ * num_features), 0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
      const std::size_t of_piece = at(piece * num_shards_ + shard);
      num_keys_[at(shard)] += piece_keys_[of_piece];
      num_filled_[at(shard * num_features + piece_feature_[at(piece)])] += piece_filled_[of_piece];
    }
  }
  num_words_ = num_keys_;
  for (std::int64_t& words : num_words_) words += words_before_keys();
}

/// Words to a shard that are not keys.
std::int64_t BagCutter::words_before_keys() const {
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  if (batch_.every_key_is_a_bag) return num_features;
  const auto num_lengths = static_cast<std::int64_t>(batch_.lengths.size());
  return num_features + 1 + words_of_lengths(num_lengths, length_bytes_);
}

/// Pieces are bags of one feature that lie side by side.
void BagCutter::make_pieces() {
  std::int64_t bag = 0;
  std::int64_t key = 0;
  for (std::size_t feature = 0; feature < batch_.num_bags.size(); ++feature) {
    first_bag_.push_back(bag);
    const std::int64_t end = bag + batch_.num_bags[feature];
    while (bag < end) {
      piece_feature_.push_back(static_cast<std::int64_t>(feature));
      piece_bag_.push_back(bag);
      piece_key_.push_back(key);
      const std::int64_t next = std::min(end, bag + kBagsOfPiece);
      key += has_single_keys_ ? next - bag : sum(batch_.lengths.subspan(at(bag), at(next - bag)));
      bag = next;
    }
  }
  first_bag_.push_back(bag);
  piece_bag_.push_back(bag);
  piece_key_.push_back(key);
}

void BagCutter::count_piece(std::int64_t piece) {
  std::int64_t* const keys = &piece_keys_[at(piece * num_shards_)];
  std::int64_t* const filled = &piece_filled_[at(piece * num_shards_)];
  const std::int64_t begin = piece_key_[at(piece)];
  const std::int64_t end = piece_key_[at(piece + 1)];
  if (num_shards_ == 1) {
    keys[0] = end - begin;
  } else {
    const std::span owners(owners_.get() + begin, at(end - begin));
    find_owners(batch_.keys.subspan(at(begin), at(end - begin)), owners, num_shards_, rule_,
                virtual_shard_bits_);
    count_owners(owners, num_shards_, keys);
  }
  if (has_single_keys_) {
    std::copy_n(keys, num_shards_, filled);
    return;
  }
  if (goes_by_bag_) {
    for_each_bag(piece, [&](std::int64_t, const std::int64_t* counts) {
      for (std::int64_t shard = 0; shard < num_shards_; ++shard)
        filled[shard] += static_cast<std::int64_t>(counts[shard] > 0);
    });
    return;
  }
  std::vector<std::int64_t> last(at(num_shards_), -1);  // the last bag with keys of each shard
  std::int64_t key = begin;
  for (std::int64_t bag = piece_bag_[at(piece)]; bag < piece_bag_[at(piece + 1)]; ++bag) {
    const std::int64_t after = key + batch_.lengths[at(bag)];
    for (; key < after; ++key) {
      const std::size_t owner = owners_[at(key)];
      filled[owner] += static_cast<std::int64_t>(last[owner] != bag);
      last[owner] = bag;
    }
  }
}

/// Calls use(bag, keys of each shard) for each bag of a piece, of few shards.
template <typename Use>
void BagCutter::for_each_bag(std::int64_t piece, const Use& use) const {
  std::array<std::int64_t, kFewShards> counts{};
  const std::uint16_t* owners = num_shards_ == 1 ? nullptr : owners_.get() + piece_key_[at(piece)];
  for (std::int64_t bag = piece_bag_[at(piece)]; bag < piece_bag_[at(piece + 1)]; ++bag) {
    const std::int64_t length = batch_.lengths[at(bag)];
    if (num_shards_ > 1) {
      const std::span own(owners, at(length));
      std::fill_n(counts.begin(), num_shards_, 0);
      count_owners(own, num_shards_, counts.data());
      owners += length;
    } else {
      counts[0] = length;
    }
    use(bag, counts.data());
  }
}

void BagCutter::write(std::span<std::int64_t> words, std::span<std::int64_t> places,
                      std::span<std::int32_t> filled, bool in_batch) const {
  const std::int64_t num_all_keys = sum(num_keys_);
  if (static_cast<std::int64_t>(words.size()) != sum(num_words_) ||
      (!places.empty() && static_cast<std::int64_t>(places.size()) != num_all_keys) ||
      static_cast<std::int64_t>(filled.size()) != sum(num_filled_))
    refuse(internal::must("words, places and filled",
                          "have " + numbers_of(sum(num_words_), num_all_keys, sum(num_filled_)) +
                              " numbers, or no places",
                          numbers_of(std::ssize(words), std::ssize(places), std::ssize(filled))));
  if (in_batch && first_bag_.back() > kMostBags)
    refuse_bags("bags that are counted together", first_bag_.back());
  const auto num_pieces = static_cast<std::int64_t>(piece_feature_.size());
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  Heads heads{words, places, filled, in_batch, {}, piece_keys_, piece_filled_, {}};
  std::int64_t word = 0;
  std::int64_t all_keys = 0;
  std::int64_t all_filled = 0;
  for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
    heads.first_word.push_back(word);
    heads.first_key.push_back(all_keys);
    for (std::int64_t feature = 0; feature < num_features; ++feature) {
      words[at(word + feature)] = batch_.every_key_is_a_bag
                                      ? num_filled_[at(shard * num_features + feature)]
                                      : batch_.num_bags[at(feature)];
    }
    if (!batch_.every_key_is_a_bag) {
      words[at(word + num_features)] = length_bytes_;
      if (!batch_.lengths.empty()) words[at(word + words_before_keys() - 1)] = 0;  // also its end
    }
    std::int64_t keys = 0;
    for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
      const std::size_t of_piece = at(piece * num_shards_ + shard);
      heads.keys[of_piece] = keys;
      heads.fills[of_piece] = all_filled;
      keys += piece_keys_[of_piece];
      all_filled += piece_filled_[of_piece];
    }
    all_keys += keys;
    word += num_words_[at(shard)];
  }
  internal::parallel_for(num_pieces, 1, num_threads(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) write_piece(heads, piece);
  });
}

void BagCutter::write_piece(const Heads& heads, std::int64_t piece) const {
  with_length(length_bytes_, [&](auto length) {
    using Length = decltype(length);
    if (has_single_keys_)
      write_single_keys<Length>(heads, piece);
    else if (goes_by_bag_)
      write_bag_by_bag<Length>(heads, piece);
    else
      write_bags<Length>(heads, piece);
  });
}

template <typename Length>
void BagCutter::write_bag_by_bag(const Heads& heads, std::int64_t piece) const {
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  const std::int64_t first_bag = heads.in_batch ? 0 : first_bag_[at(piece_feature_[at(piece)])];
  const std::int64_t begin = piece_key_[at(piece)];
  const std::int64_t count = piece_key_[at(piece + 1)] - begin;
  std::array<Key*, kFewShards> keys{};
  std::array<std::int64_t*, kFewShards> places{};
  std::array<std::int32_t*, kFewShards> filled{};
  std::vector<WrittenLengths<Length>> lengths;
  for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
    const std::size_t of_piece = at(piece * num_shards_ + shard);
    std::int64_t* const words = heads.words.data() + heads.first_word[at(shard)];
    keys[at(shard)] = words + words_before_keys() + heads.keys[of_piece];
    if (!heads.places.empty())
      places[at(shard)] = heads.places.data() + heads.first_key[at(shard)] + heads.keys[of_piece];
    filled[at(shard)] = heads.filled.data() + heads.fills[of_piece];
    lengths.emplace_back(words + num_features + 1);
  }
  const std::span<const Key> given = batch_.keys.subspan(at(begin), at(count));
  if (num_shards_ == 1) {
    std::ranges::copy(given, keys[0]);
    if (!heads.places.empty()) std::iota(places[0], places[0] + count, begin);
  } else {
    const std::span owners(owners_.get() + begin, at(count));
    deal_keys(given, owners, num_shards_, keys.data());
    if (!heads.places.empty()) deal_numbers(owners, begin, num_shards_, places.data());
  }
  for_each_bag(piece, [&](std::int64_t bag, const std::int64_t* counts) {
    for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
      lengths[at(shard)].set(bag, static_cast<Length>(counts[shard]));
      if (counts[shard] > 0) *filled[at(shard)]++ = static_cast<std::int32_t>(bag - first_bag);
    }
  });
}

template <typename Length>
void BagCutter::write_bags(const Heads& heads, std::int64_t piece) const {
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  const std::int64_t first_bag = heads.in_batch ? 0 : first_bag_[at(piece_feature_[at(piece)])];
  const std::int64_t bags_begin = piece_bag_[at(piece)];
  const std::int64_t bags_end = piece_bag_[at(piece + 1)];
  const auto of_piece = heads.keys.begin() + piece * num_shards_;
  std::vector<std::int64_t> next_key(of_piece, of_piece + num_shards_);
  const auto fills = heads.fills.begin() + piece * num_shards_;
  std::vector<std::int64_t> next_fill(fills, fills + num_shards_);
  std::vector<std::int64_t*> keys;
  std::vector<WrittenLengths<Length>> lengths;
  std::vector<std::int64_t> last(at(num_shards_), -1);
  for (const std::int64_t first : heads.first_word) {
    std::int64_t* const words = heads.words.data() + first;
    keys.push_back(words + words_before_keys());
    lengths.emplace_back(words + num_features + 1);
    lengths.back().clear(bags_begin, bags_end);
  }
  std::int64_t key = piece_key_[at(piece)];
  for (std::int64_t bag = bags_begin; bag < bags_end; ++bag) {
    const std::int64_t after = key + batch_.lengths[at(bag)];
    for (; key < after; ++key) {
      const std::size_t owner = owners_[at(key)];
      const std::int64_t place = next_key[owner]++;
      keys[owner][place] = batch_.keys[at(key)];
      lengths[owner].increment(bag);
      if (!heads.places.empty()) heads.places[at(heads.first_key[owner] + place)] = key;
      if (last[owner] != bag)
        heads.filled[at(next_fill[owner]++)] = static_cast<std::int32_t>(bag - first_bag);
      last[owner] = bag;
    }
  }
}

/// As `write_bags`; the bag of a key has the key's number.
template <typename Length>
void BagCutter::write_single_keys(const Heads& heads, std::int64_t piece) const {
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  const std::int64_t first_bag = heads.in_batch ? 0 : first_bag_[at(piece_feature_[at(piece)])];
  const std::int64_t begin = piece_bag_[at(piece)];
  const std::int64_t end = piece_bag_[at(piece + 1)];
  struct Head {
    std::int64_t* key;
    std::int32_t* filled;
    std::int64_t* place;
    WrittenLengths<Length> lengths;
  };
  std::vector<Head> next;
  for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
    const std::size_t of_piece = at(piece * num_shards_ + shard);
    std::int64_t* const words = heads.words.data() + heads.first_word[at(shard)];
    std::int64_t* const places =
        heads.places.data() + (heads.places.empty() ? 0 : heads.first_key[at(shard)]);
    next.push_back({words + words_before_keys() + heads.keys[of_piece],
                    heads.filled.data() + heads.fills[of_piece],
                    heads.places.empty() ? nullptr : places + heads.keys[of_piece],
                    WrittenLengths<Length>(words + num_features + 1)});
    if (!batch_.every_key_is_a_bag) next.back().lengths.clear(begin, end);
  }
  if (num_shards_ == 2) {
    const std::span<const std::uint16_t> owners(owners_.get() + begin, at(end - begin));
    internal::kernels().deal({batch_.keys.data() + begin,
                              owners.data(),
                              end - begin,
                              static_cast<std::int32_t>(begin - first_bag),
                              {next[0].key, next[1].key},
                              {next[0].filled, next[1].filled}});
    if (!heads.places.empty()) deal_to_two(owners, begin, next[0].place, next[1].place);
    for (std::int64_t key = begin; key < end && !batch_.every_key_is_a_bag; ++key) {
      const std::uint16_t owner = owners[at(key - begin)];
      next[0].lengths.set(key, static_cast<Length>(1 - owner));
      next[1].lengths.set(key, static_cast<Length>(owner));
    }
    return;
  }
  for (std::int64_t key = begin; key < end; ++key) {
    Head& head = next[num_shards_ == 1 ? 0 : owners_[at(key)]];
    *head.key++ = batch_.keys[at(key)];
    *head.filled++ = static_cast<std::int32_t>(key - first_bag);
    if (head.place != nullptr) *head.place++ = key;
    if (!batch_.every_key_is_a_bag) head.lengths.set(key, 1);
  }
}

}  // namespace recsdk
