// What changed in an index since its last durable cut: a bit per row, and the keys that left.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "keymap/key_map.h"
#include "recsdk/types.h"
#include "rows/row_bits.h"

namespace recsdk::internal {

/// The index's lock guards it; a thread that holds the lock of the rows may set bits too.
class ChangeTracker {
 public:
  explicit ChangeTracker(std::uint64_t hash_seed) : left_(hash_seed) {}

  /// Makes room for changes of rows below `num_rows`.
  void grow(std::int64_t num_rows) { changed_.grow(num_rows); }

  /// See RowBits; nothing has changed.
  bool back_some() noexcept { return changed_.back_some(); }

  /// Forgets all, so that nothing has changed.
  void clear() noexcept {
    changed_.clear_all();
    left_.clear();
  }

  /// The distinct rows of sorted items [begin, end) change.
  void note_changed(const GradItem* items, std::int64_t begin, std::int64_t end) noexcept;
  void note_changed(std::int64_t row) noexcept { changed_.set(row); }
  /// Readers see the row of this key from now on.
  void note_visible(std::int64_t row, Key key) noexcept {
    changed_.set(row);
    if (left_.size() > 0) left_.erase(key);
  }

  /// Those of these keys that the index has are about to leave. If it throws, nothing has changed.
  void note_leaving(std::span<const Key> keys, const KeyMap& index);
  void note_all_leaving(const KeyMap& index);
  /// The key has left. If it throws, nothing has changed.
  void note_left(Key key) { left_.find_or_insert(key, 0); }

  /// Takes in what an earlier tracker holds; keys that are visible now have not left. If it throws,
  /// this tracker is of no more use.
  template <typename IsVisible>
  void merge(const ChangeTracker& earlier, const IsVisible& is_visible) {
    changed_.grow(earlier.changed_.num_words() * kWordRows);
    for (std::int64_t i = 0; i < earlier.changed_.num_words(); ++i)
      set_bits(changed_.word(i), earlier.changed_.word(i));
    earlier.left_.for_each([&](Key key, std::uint32_t) {
      if (!is_visible(key)) left_.find_or_insert(key, 0);
    });
  }

  const RowBits& changed() const noexcept { return changed_; }
  std::int64_t num_left() const noexcept { return left_.size(); }
  /// The keys that left, in any order.
  std::vector<Key> left() const;
  std::int64_t bytes() const { return changed_.bytes() + left_.stats().bytes; }

 private:
  RowBits changed_;
  KeyMap left_;  // a set: row numbers mean nothing
};

}  // namespace recsdk::internal
