// A batch on its way between processes: cut by the shard that each key belongs to, and read where
// it arrives.
//
// What goes to a shard is one run of 64-bit words: how many bags each feature has (F), how many
// bytes a length takes (1), how many keys of the shard each bag has (G lengths, one behind the
// other, filled up to a whole word), and those keys, in the order of the batch. A length takes 1,
// 2, 4 or 8 bytes: as many as the batch's longest bag needs. If every key is a bag, the lengths and
// their size are left out, and a feature has as many bags as it has keys there.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// Which shard of W owns a key. Fixed for ever: checkpoints and placements depend on it.
enum class OwnerRule : std::uint8_t {
  kVirtualShard = 0,  ///< v * W / V, where v is the key's virtual shard of V
  kModulo = 1,        ///< the key as an unsigned number, modulo W
};

/// The bags of F features, feature by feature.
struct FeatureBatch {
  std::span<const Key> keys;              ///< (N,), bag by bag
  std::span<const std::int64_t> lengths;  ///< (G,), keys of each bag; not used if each is one
  /// (F,), bags of each feature, below 2^31; they add up to G
  std::span<const std::int64_t> num_bags;
  bool every_key_is_a_bag = false;
};

/// What the lengths of the bags of F features say of each feature.
struct FeatureCounts {
  std::vector<std::int64_t> num_keys;          ///< (F,)
  std::vector<std::uint8_t> has_one_key_each;  ///< (F,), whether each of its bags has one
};

/// Counts the keys of features with `num_bags` bags (F,), whose lengths (G,) lie one after the
/// other, of `num_keys` in all. Throws std::invalid_argument for lengths that are negative or do
/// not add up to that, or whose number is not that of the bags. Cost: one pass over the lengths.
RECSDK_API FeatureCounts count_keys(std::span<const std::int64_t> lengths,
                                    std::span<const std::int64_t> num_bags, std::int64_t num_keys);
/// The same, of lengths that take half as much memory.
RECSDK_API FeatureCounts count_keys(std::span<const std::int32_t> lengths,
                                    std::span<const std::int64_t> num_bags, std::int64_t num_keys);

/// Writes where bags begin among their feature's keys: of each feature num_bags + 1 offsets, from 0
/// on, to the number of its keys. `lengths` (G,) and `num_bags` (F,) as of `count_keys`; `offsets`
/// (G + F,). Throws std::invalid_argument for lengths that are negative or have no sum, and for
/// arrays that do not fit each other; `offsets` is unspecified then. Cost: one pass over the
/// lengths, two over those of features with more than 16,384 bags.
RECSDK_API void lay_out_offsets(std::span<const std::int64_t> lengths,
                                std::span<const std::int64_t> num_bags,
                                std::span<std::int64_t> offsets);
/// The same, of lengths that take half as much memory.
RECSDK_API void lay_out_offsets(std::span<const std::int32_t> lengths,
                                std::span<const std::int64_t> num_bags,
                                std::span<std::int64_t> offsets);

/// Bags of a feature, or of a part of one.
struct BagPiece {
  std::span<const std::int64_t> offsets;  ///< (bags + 1,), from 0 to num_keys; empty: a key each
  std::int64_t num_keys = 0;
};

/// Writes the offsets of all bags of several pieces whose keys lie one behind the other: (B + 1,),
/// from 0 on. Throws std::invalid_argument for offsets that descend or do not run from 0 to their
/// piece's number of keys, for room of another size, and for keys that are too many for 32 bits;
/// `out` is unspecified then. Cost: one pass over the bags.
RECSDK_API void join_offsets(std::span<const BagPiece> pieces, std::span<std::int32_t> out);
/// The same, for any number of keys.
RECSDK_API void join_offsets(std::span<const BagPiece> pieces, std::span<std::int64_t> out);

/// A batch whose keys are known by shard, ready to be written. Refers to the batch's arrays.
class RECSDK_API BagCutter {
 public:
  /// Finds each key's owner among `num_shards`, 1 to 65,536. A shard owns whole virtual shards of
  /// `num_virtual_shards`, a power of two up to kNumVirtualShards, each a run of those. Throws
  /// std::invalid_argument for a batch whose parts do not fit each other, std::bad_alloc. Cost: one
  /// pass over the keys.
  BagCutter(const FeatureBatch& batch, std::int64_t num_shards, OwnerRule rule,
            std::int64_t num_virtual_shards = kNumVirtualShards);

  std::span<const std::int64_t> num_keys() const { return num_keys_; }    ///< of each shard, (W,)
  std::span<const std::int64_t> num_words() const { return num_words_; }  ///< to each shard, (W,)
  /// Bags of each shard and feature that have keys there, (W, F).
  std::span<const std::int64_t> num_filled() const { return num_filled_; }

  /// Writes the words of all shards, shard by shard, and for each key that is sent its place in the
  /// batch, unless `places` is empty. `filled`: of each shard, which bags have keys there, in
  /// ascending order, counted from 0 within their feature, or `in_batch` within all of them. Throws
  /// std::invalid_argument for results of another size than the counts say, and for 2^31 bags and
  /// more that are counted together.
  void write(std::span<std::int64_t> words, std::span<std::int64_t> places,
             std::span<std::int32_t> filled, bool in_batch = false) const;

 private:
  struct Heads;
  void make_pieces();
  void count_piece(std::int64_t piece);
  std::int64_t words_before_keys() const;
  void write_piece(const Heads& heads, std::int64_t piece) const;
  template <typename Use>
  void for_each_bag(std::int64_t piece, const Use& use) const;
  template <typename Length>
  void write_bags(const Heads& heads, std::int64_t piece) const;
  template <typename Length>
  void write_bag_by_bag(const Heads& heads, std::int64_t piece) const;
  template <typename Length>
  void write_single_keys(const Heads& heads, std::int64_t piece) const;

  FeatureBatch batch_;
  std::int64_t num_shards_;
  OwnerRule rule_;
  int virtual_shard_bits_ = 16;          // of a key's hash, the highest of its low 16
  std::int64_t length_bytes_ = 1;        // of each length that is sent
  bool has_single_keys_ = true;          // whether each bag has one key
  bool goes_by_bag_ = false;             // whether each shard is looked at after each bag
  std::vector<std::int64_t> first_bag_;  // of each feature, (F + 1,)
  std::vector<std::int64_t> piece_feature_;
  std::vector<std::int64_t> piece_bag_;      // the first, (pieces + 1,)
  std::vector<std::int64_t> piece_key_;      // the first, (pieces + 1,)
  std::vector<std::int64_t> piece_keys_;     // how many of each shard, (pieces, W)
  std::vector<std::int64_t> piece_filled_;   // bags with keys of each shard, (pieces, W)
  std::unique_ptr<std::uint16_t[]> owners_;  // (N,), of several shards
  std::vector<std::int64_t> num_keys_;
  std::vector<std::int64_t> num_words_;
  std::vector<std::int64_t> num_filled_;
};

/// What the words of one batch say, at their beginning.
struct ArrivedBags {
  std::int64_t num_words = 0;            ///< that belong to the batch
  std::int64_t length_bytes = 0;         ///< of each length; 0: there are none
  std::vector<std::int64_t> num_keys;    ///< of each feature; the keys are the last words
  std::vector<std::int64_t> num_filled;  ///< bags of each feature that have keys
};

/// Reads what a BagCutter wrote for one shard. Throws std::invalid_argument for words that do not
/// fit each other: they are too few, or a number is negative. Cost: one pass over the lengths.
RECSDK_API ArrivedBags read_bags(std::span<const std::int64_t> words, std::int64_t num_features,
                                 bool every_key_is_a_bag);

/// Writes the ends of all bags that have keys: of each feature num_filled + 1 offsets, from 0 on.
/// `words` and `arrived` as of `read_bags`, which found bags with lengths.
RECSDK_API void write_offsets(std::span<const std::int64_t> words, const ArrivedBags& arrived,
                              std::span<std::int64_t> offsets);

}  // namespace recsdk
