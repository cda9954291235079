// From a 64-bit key to a 32-bit row number.
//
// Two maps behind one interface. Keys lie in the segmented hash; ranges of keys that turn out to be
// more than half full move to dense pages, a few at a time while keys are inserted. A key whose
// range has a page is in that page or nowhere. Which map holds a key changes speed and memory, and
// no result.
//
// Not thread-safe by itself: the index allows any number of readers or one writer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "keymap/dense_pages.h"
#include "keymap/segmented_hash.h"
#include "recsdk/types.h"

namespace recsdk::internal {

struct KeyMapStats {
  SegmentStats hashed;
  std::int64_t bytes = 0;  ///< of both maps
  std::int64_t dense_keys = 0;
  std::int64_t dense_pages = 0;
};

class KeyMap {
 public:
  explicit KeyMap(std::uint64_t hash_seed) : hashed_(hash_seed) {}

  /// Finds keys (N,): writes row numbers and kFound or kMissing; a missing key's row number is 0.
  void find(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const;

  std::optional<std::uint32_t> find_one(Key key) const;

  /// Fetches what find_one, find_or_insert and erase of this key will touch.
  void prefetch(Key key) const;

  /// The key's row number if it is there; else inserts it with `row`, which is returned. Throws
  /// Error(kOutOfMemory), std::bad_alloc or Error(kCapacity); then nothing has changed for readers.
  std::uint32_t find_or_insert(Key key, std::uint32_t row);

  /// Whether insert may be called.
  bool can_insert() const noexcept { return dense_.empty(); }

  /// find_or_insert for keys (N,) in order, while there are no dense pages: writes row numbers and
  /// kFound or kInserted; new keys get the rows from `next_row` (N,) on, which no key has. For keys
  /// that are mostly new; find is faster for others. Throws as find_or_insert; `num_done` says how
  /// many keys are done, then as well.
  void insert(std::span<const Key> keys, const std::uint32_t* next_row, RowNumber* rows,
              Outcome* outcomes, std::size_t& num_done) {
    hashed_.insert(keys, next_row, rows, outcomes, num_done);
  }

  /// Insertion by several threads at once, while there are no dense pages: each inserts the keys of
  /// shards of its own. See SegmentedHash.
  int shard_bits(int most) const noexcept { return can_insert() ? hashed_.shard_bits(most) : 0; }
  std::uint64_t hash(Key key) const { return hashed_.hash(key); }
  void begin_sharing(std::int64_t num_new) { hashed_.begin_sharing(num_new); }
  void insert_absent(std::span<const Key> keys, const std::uint32_t* rows, std::size_t& num_done) {
    hashed_.insert_absent(keys, rows, num_done);
  }
  void end_sharing(std::int64_t num_done) noexcept { hashed_.end_sharing(num_done); }

  /// Takes the key out; returns its row number. Allocates nothing.
  std::optional<std::uint32_t> erase(Key key) noexcept;

  /// Empties the map and frees its memory.
  void clear() noexcept;

  /// Exchanges contents, the hash included.
  void swap(KeyMap& other) noexcept;

  /// Readies memory for `num_keys` keys in all, and grows for them.
  void reserve(std::int64_t num_keys);

  /// Takes the shape for `num_keys` keys in all at once, unless most keys so far are in dense
  /// pages. Call it early, while there are few keys. Throws as find_or_insert.
  void grow_for(std::int64_t num_keys);

  /// Call it amid the insertion of many keys, of which about `num_new` are still to come.
  /// Throws as find_or_insert.
  void expect(std::int64_t num_new) {
    if (dense_.empty()) hashed_.expect(num_new);
  }

  /// Backs with memory a huge page that will be needed soon. False if there is none.
  bool populate_ahead() noexcept { return hashed_.populate_ahead(); }

  /// Looks for ranges that are worth a dense page, and moves their keys. Call it after
  /// `num_inserted` insertions; its cost is in proportion to them.
  void adapt(std::int64_t num_inserted) noexcept;

  std::int64_t size() const noexcept { return hashed_.size() + dense_.size(); }
  KeyMapStats stats() const;

  /// Calls visit(key, row) for every key, in no particular order.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    hashed_.for_each(visit);
    dense_.for_each(visit);
  }

  /// Throws Error(kInternal) if a key cannot be reached, is there twice, or a count is wrong.
  void check_invariants() const;

 private:
  void find_in_both(std::span<const Key> keys, RowNumber* rows, Outcome* outcomes) const;
  bool is_at_border_of_dense(Key key) const;
  bool adopt(std::uint64_t id, std::int64_t at_least);
  void inspect_segment();
  void add_candidate(std::uint64_t id);

  SegmentedHash hashed_;
  DensePages dense_;
  std::array<std::uint64_t, 64> candidates_{};  // ranges to look at more closely
  std::size_t num_candidates_ = 0;
  std::uint64_t cursor_ = 0;            // the segment to be looked at next
  std::int64_t inspection_budget_ = 0;  // insertions that have not been paid out yet
  std::int64_t adoption_budget_ = 0;
};

}  // namespace recsdk::internal
