#include "recsdk/routing.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/runtime.h"
#include "util/hash.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::int64_t kMaxShards = 65536;
constexpr std::int64_t kBagsOfPiece = 4096;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::int64_t sum(std::span<const std::int64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("cutting a batch by shards: " + what);
}

void check(const FeatureBatch& batch, std::int64_t num_shards) {
  if (num_shards < 1 || num_shards > kMaxShards)
    refuse("there are 1 to 65536 shards, got " + std::to_string(num_shards));
  const auto num_keys = static_cast<std::int64_t>(batch.keys.size());
  const auto num_lengths = static_cast<std::int64_t>(batch.lengths.size());
  const std::int64_t wanted = batch.every_key_is_a_bag ? num_keys : num_lengths;
  // None above the total, so that sums do not overflow.
  if (std::ranges::any_of(batch.num_bags, [&](auto n) { return n < 0 || n > wanted; }))
    refuse("num_bags must not be negative, nor more than all " + std::to_string(wanted) + " bags");
  const std::int64_t num_bags = sum(batch.num_bags);
  if (num_bags != wanted)
    refuse("num_bags adds up to " + std::to_string(num_bags) + " bags, but there are " +
           std::to_string(wanted));
  if (batch.every_key_is_a_bag) return;
  if (std::ranges::any_of(batch.lengths, [&](auto n) { return n < 0 || n > num_keys; }))
    refuse("lengths must not be negative, nor more than all " + std::to_string(num_keys) + " keys");
  if (const std::int64_t total = sum(batch.lengths); total != num_keys)
    refuse("lengths add up to " + std::to_string(total) + " keys, but there are " +
           std::to_string(num_keys));
}

/// Calls found(i, owner) for the keys [begin, end).
template <typename Found>
void find_owners(std::span<const Key> keys, std::int64_t begin, std::int64_t end,
                 std::int64_t num_shards, OwnerRule rule, const Found& found) {
  const auto count = static_cast<std::uint64_t>(num_shards);
  for (std::int64_t i = begin; i < end; ++i) {
    const auto key = static_cast<std::uint64_t>(keys[at(i)]);
    const std::uint64_t owner = rule == OwnerRule::kModulo
                                    ? key % count
                                    : ((internal::virtual_shard_hash(key) & 0xFFFFU) * count) >> 16;
    found(i, static_cast<std::int64_t>(owner));
  }
}

}  // namespace

/// Where a piece writes next, for each shard.
struct BagCutter::Heads {
  std::span<std::int64_t> words;
  std::span<std::int64_t> places;
  std::span<std::int64_t> filled;
  std::vector<std::int64_t> first_word;  // (W,)
  std::vector<std::int64_t> keys;        // (pieces, W), within the shard's keys
  std::vector<std::int64_t> fills;       // (pieces, W), among all
  std::vector<std::int64_t> first_key;   // (W,), among the keys of all shards
};

BagCutter::BagCutter(const FeatureBatch& batch, std::int64_t num_shards, OwnerRule rule)
    : batch_(batch), num_shards_(num_shards), rule_(rule) {
  check(batch_, num_shards_);
  make_pieces();
  const auto num_pieces = static_cast<std::int64_t>(piece_feature_.size());
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  owners_.resize(num_shards_ > 1 ? batch_.keys.size() : 0);
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
  const auto num_lengths =
      batch_.every_key_is_a_bag ? 0 : static_cast<std::int64_t>(batch_.lengths.size());
  num_words_ = num_keys_;
  for (std::int64_t& words : num_words_) words += num_features + num_lengths;
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
      key += batch_.every_key_is_a_bag ? next - bag
                                       : sum(batch_.lengths.subspan(at(bag), at(next - bag)));
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
    find_owners(batch_.keys, begin, end, num_shards_, rule_,
                [&](std::int64_t i, std::int64_t owner) {
                  owners_[at(i)] = static_cast<std::uint16_t>(owner);
                  ++keys[owner];
                });
  }
  if (batch_.every_key_is_a_bag) {
    std::copy_n(keys, num_shards_, filled);
    return;
  }
  std::vector<std::int64_t> last(at(num_shards_), -1);  // the last bag with keys of each shard
  std::int64_t key = begin;
  for (std::int64_t bag = piece_bag_[at(piece)]; bag < piece_bag_[at(piece + 1)]; ++bag) {
    const std::int64_t after = key + batch_.lengths[at(bag)];
    for (; key < after; ++key) {
      const std::size_t owner = num_shards_ == 1 ? 0 : owners_[at(key)];
      filled[owner] += static_cast<std::int64_t>(last[owner] != bag);
      last[owner] = bag;
    }
  }
}

void BagCutter::write(std::span<std::int64_t> words, std::span<std::int64_t> places,
                      std::span<std::int64_t> filled) const {
  const std::int64_t num_all_keys = sum(num_keys_);
  if (static_cast<std::int64_t>(words.size()) != sum(num_words_) ||
      (!places.empty() && static_cast<std::int64_t>(places.size()) != num_all_keys) ||
      static_cast<std::int64_t>(filled.size()) != sum(num_filled_))
    refuse("the results must have as many numbers as its counts say");
  const auto num_pieces = static_cast<std::int64_t>(piece_feature_.size());
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  Heads heads{words, places, filled, {}, piece_keys_, piece_filled_, {}};
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
  const auto num_features = static_cast<std::int64_t>(batch_.num_bags.size());
  const auto num_lengths =
      batch_.every_key_is_a_bag ? 0 : static_cast<std::int64_t>(batch_.lengths.size());
  const std::int64_t first_bag = first_bag_[at(piece_feature_[at(piece)])];
  const std::int64_t bags_begin = piece_bag_[at(piece)];
  const std::int64_t bags_end = piece_bag_[at(piece + 1)];
  const auto of_piece = heads.keys.begin() + piece * num_shards_;
  std::vector<std::int64_t> next_key(of_piece, of_piece + num_shards_);
  const auto fills = heads.fills.begin() + piece * num_shards_;
  std::vector<std::int64_t> next_fill(fills, fills + num_shards_);
  std::vector<std::int64_t*> lengths(at(num_shards_));
  std::vector<std::int64_t> last(at(num_shards_), -1);
  for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
    lengths[at(shard)] = heads.words.data() + heads.first_word[at(shard)] + num_features;
    if (num_lengths > 0)
      std::fill(lengths[at(shard)] + bags_begin, lengths[at(shard)] + bags_end, 0);
  }
  std::int64_t key = piece_key_[at(piece)];
  for (std::int64_t bag = bags_begin; bag < bags_end; ++bag) {
    const std::int64_t after = key + (num_lengths > 0 ? batch_.lengths[at(bag)] : 1);
    for (; key < after; ++key) {
      const std::size_t owner = num_shards_ == 1 ? 0 : owners_[at(key)];
      const std::int64_t place = next_key[owner]++;
      lengths[owner][num_lengths + place] = batch_.keys[at(key)];
      if (num_lengths > 0) ++lengths[owner][bag];
      if (!heads.places.empty()) heads.places[at(heads.first_key[owner] + place)] = key;
      if (last[owner] != bag) heads.filled[at(next_fill[owner]++)] = bag - first_bag;
      last[owner] = bag;
    }
  }
}

ArrivedBags read_bags(std::span<const std::int64_t> words, std::int64_t num_features,
                      bool every_key_is_a_bag) {
  const auto size = static_cast<std::int64_t>(words.size());
  const auto reject = [&](const std::string& what) {
    throw std::invalid_argument("reading a batch of " + std::to_string(num_features) +
                                " features from " + std::to_string(size) + " words: " + what);
  };
  if (num_features < 0 || num_features > size) reject("the numbers of bags are not all there");
  ArrivedBags found;
  std::int64_t room = size - num_features;
  std::int64_t bag = num_features;  // the word with its length
  for (const std::int64_t count : words.first(at(num_features))) {
    if (count < 0 || count > room) reject(std::to_string(count) + " bags do not fit");
    room -= count;
    std::int64_t num_keys = count;
    std::int64_t num_filled = count;
    if (!every_key_is_a_bag) {
      const auto lengths = words.subspan(at(bag), at(count));
      bag += count;
      num_keys = num_filled = 0;
      for (const std::int64_t length : lengths) {
        if (length < 0 || length > size - num_keys)
          reject("a bag of " + std::to_string(length) + " keys does not fit");
        num_keys += length;
        num_filled += static_cast<std::int64_t>(length > 0);
      }
    }
    found.num_keys.push_back(num_keys);
    found.num_filled.push_back(num_filled);
  }
  found.num_words = bag;
  for (const std::int64_t count : found.num_keys) {
    if (count > size - found.num_words) reject("the keys are not all there");
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
    throw std::invalid_argument("write_offsets: there is room for " +
                                std::to_string(offsets.size()) + " offsets; pass room for " +
                                std::to_string(wanted));
  const std::int64_t* length = words.data() + num_features;
  std::int64_t* next = offsets.data();
  for (std::int64_t feature = 0; feature < num_features; ++feature) {
    *next++ = 0;
    std::int64_t end = 0;
    std::int64_t left = words[at(feature)];
    std::int64_t* const after = next + arrived.num_filled[at(feature)];
    for (; left > 0 && next < after; --left) {
      end += *length;
      *next = end;
      next += static_cast<std::int64_t>(*length > 0);
      ++length;
    }
    length += left;  // empty bags after the last that has keys
  }
}

}  // namespace recsdk
