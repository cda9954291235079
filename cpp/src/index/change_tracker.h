// What changed in an index since its last durable cut: a bit per row, and the keys that left.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "keymap/key_map.h"
#include "recsdk/leavers.h"
#include "recsdk/types.h"
#include "rows/row_bits.h"

namespace recsdk::internal {

/// A key that left, and why; ordered by cause.
struct LeftKey {
  LeaveCause cause = LeaveCause::kErased;
  Key key = 0;

  friend auto operator<=>(const LeftKey&, const LeftKey&) = default;
};

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
  void note_changed(const GradItem* items, std::int64_t begin, std::int64_t end) noexcept {
    changed_.set(items, begin, end);
  }
  void note_changed(std::int64_t row) noexcept { changed_.set(row); }
  /// Readers see the row of this key from now on.
  void note_visible(std::int64_t row, Key key) noexcept {
    changed_.set(row);
    if (left_.size() > 0) left_.erase(key);
  }

  /// Those of these keys that the index has are about to leave. If it throws, nothing has changed.
  void note_leaving(std::span<const LeftKey> keys, const KeyMap& index);
  void note_all_erased(const KeyMap& index);
  /// The key has left. If it throws, nothing has changed.
  void note_left(Key key, LeaveCause cause) {
    left_.find_or_insert(key, static_cast<std::uint32_t>(cause));
  }

  /// Takes in what an earlier tracker holds; keys that are visible now have not left. If it throws,
  /// this tracker is of no more use.
  template <typename IsVisible>
  void merge(const ChangeTracker& earlier, const IsVisible& is_visible) {
    changed_.grow(earlier.changed_.num_words() * kWordRows);
    for (std::int64_t i = 0; i < earlier.changed_.num_words(); ++i)
      set_bits(changed_.word(i), earlier.changed_.word(i));
    earlier.left_.for_each([&](Key key, std::uint32_t cause) {
      if (!is_visible(key)) left_.find_or_insert(key, cause);
    });
  }

  const RowBits& changed() const noexcept { return changed_; }
  std::int64_t num_left() const noexcept { return left_.size(); }
  /// The keys that left, by cause and key.
  std::vector<LeftKey> left() const;
  std::int64_t bytes() const { return changed_.bytes() + left_.stats().bytes; }

 private:
  RowBits changed_;
  KeyMap left_;  // to causes
};

}  // namespace recsdk::internal
