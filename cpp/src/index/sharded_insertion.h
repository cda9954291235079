// Insertion of a large batch on all threads.
//
// Row numbers are those of one thread that takes keys in input order, so they are known before
// anything is written:
//
// 1. By chunks of the input: keys are found, and those that are missing are dealt to shards, which
//    are ranges of the hash with segments of their own. A shard keeps the order of the input.
// 2. By shards: which missing keys are the first of their kind in this call. Others are duplicates.
// 3. By chunks: the first ones get row numbers, counted through by a prefix sum over chunks.
// 4. By shards: keys go into the map. This alone may fail half-way, and is taken back then.
// 5. By chunks: duplicates get the answers of the first ones.
//
// What one thread does alone are sums over chunks and shards, bits of rows, and doubling the
// directory: a fraction of a nanosecond per key.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "keymap/key_map.h"
#include "recsdk/types.h"
#include "rows/row_numbers.h"

namespace recsdk::internal {

class ShardedInsertion {
 public:
  /// Below so many keys one thread is as fast.
  static constexpr std::size_t kFewestKeys = 16'384;
  /// How many are inserted at a time, at most.
  static constexpr std::size_t kMostKeys = std::size_t{1} << 20;
  static constexpr int kFewestShardBits = 6;

  /// For keys (N,) of which rows and outcomes (N,) are wanted. Finds them: rows of those found,
  /// kFound and kMissing. `shard_bits` as the map says. Throws std::bad_alloc.
  ShardedInsertion(KeyMap& map, RowNumbers& numbers, std::span<const Key> keys, RowNumber* rows,
                   Outcome* outcomes, int shard_bits, int max_threads);

  /// How many keys are missing, duplicates among them.
  std::int64_t num_missing() const noexcept { return num_missing_; }
  /// Tells first keys from duplicates; returns how many distinct keys are missing. Changes nothing;
  /// throws std::bad_alloc.
  std::int64_t tell_apart();
  /// Inserts them; their rows are prepared. Writes the row numbers to `new_rows`, one for each, in
  /// input order. Throws as KeyMap::find_or_insert; then nothing has changed but rows and outcomes.
  void insert(RowState state, std::span<std::uint32_t> new_rows);

 private:
  static constexpr std::uint32_t kNoRow = 0xFFFFFFFFU;  // no row has this number

  template <typename Body>
  void for_chunks(const Body& body) const;
  template <typename Body>
  void for_shards(const Body& body) const;
  std::span<const Key> keys_of(std::int64_t chunk) const;
  std::size_t shard_of(Key key) const;
  std::size_t cell(std::int64_t chunk, std::size_t shard) const;
  std::int64_t shard_end(std::size_t shard) const;
  void find();
  void add_up();
  void deal();
  void tell_apart(std::size_t shard, std::vector<std::uint32_t>& slots);
  void give_rows(std::int64_t chunk, std::span<std::uint32_t> new_rows);
  void insert_shards();
  void answer_duplicates(std::int64_t chunk) noexcept;

  KeyMap& map_;
  RowNumbers& numbers_;
  const std::span<const Key> keys_;
  RowNumber* const rows_;
  Outcome* const outcomes_;
  const int shard_bits_;
  const int max_threads_;
  const std::int64_t chunk_keys_;
  const std::int64_t num_chunks_;
  const std::size_t num_shards_;
  std::int64_t num_missing_ = 0;
  std::int64_t num_distinct_ = 0;
  // Where the missing keys of each chunk and shard begin, shard after shard; and the first ones of
  // them, which move to the start of their shard.
  std::vector<std::uint32_t> begins_;
  std::vector<std::uint32_t> first_begins_;
  std::vector<std::int64_t> num_distinct_in_;       // of each shard
  std::unique_ptr<Key[]> dealt_;                    // (num_missing,): the first ones at last
  std::unique_ptr<std::uint32_t[]> firsts_;         // (num_missing,): where the first one is
  std::unique_ptr<std::uint32_t[]> rows_of_dealt_;  // (num_missing,): of the first ones
};

}  // namespace recsdk::internal
