// The row numbers of an index: which are used, by which keys, and which are free.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "recsdk/types.h"
#include "rows/row_bits.h"
#include "rows/slabs.h"
#include "util/prefetch.h"

namespace recsdk::internal {

/// What a row is to readers.
enum class RowState : std::uint8_t {
  kFree,      ///< no key has it
  kVisible,   ///< a key has it
  kInFlight,  ///< a key has it, but only later batches see that
};

/// Stable row numbers, and what is kept of each. Not thread-safe: the index's lock guards it,
/// except for `end`.
class RowNumbers {
 public:
  /// With room for so many words of metadata for each key.
  explicit RowNumbers(int num_meta_words = 0) : keys_(sizeof(Key), 0, kSlabBytes) {
    constexpr auto kWord = static_cast<std::int64_t>(sizeof(std::int64_t));
    if (num_meta_words > 0) meta_.emplace(num_meta_words * kWord, 0, kSlabBytes);
  }

  /// Makes sure that `count` calls of allocate, or of free, cannot fail. Throws
  /// Error(kOutOfMemory), Error(kCapacity), std::bad_alloc.
  void prepare_allocate(std::int64_t count);
  void prepare_free(std::int64_t count);

  /// The row that the next call of allocate gives.
  std::uint32_t next_to_allocate() const noexcept {
    return free_.empty() ? static_cast<std::uint32_t>(end()) : free_.back();
  }
  /// A free row for the key: the one freed last, else the next new one.
  std::uint32_t allocate(Key key, RowState state) noexcept;
  /// How many calls of allocate there can be from now on.
  std::int64_t num_left() const noexcept {
    return kMaxRows - end() + static_cast<std::int64_t>(free_.size());
  }
  /// Makes sure that append of `count` keys cannot fail. False if that needs rows freed before, or
  /// more than there can be. Throws Error(kOutOfMemory), std::bad_alloc.
  bool prepare_append(std::int64_t count);
  /// New rows for the keys (N,) whose outcome is kInserted, one after the other from end() on.
  void append(std::span<const Key> keys, const Outcome* outcomes, RowState state) noexcept;
  /// The row that the i-th call of allocate from now on gives.
  std::uint32_t to_allocate(std::int64_t i) const noexcept {
    const auto num_free = static_cast<std::int64_t>(free_.size());
    return i < num_free ? free_[static_cast<std::size_t>(num_free - 1 - i)]
                        : static_cast<std::uint32_t>(end() + (i - num_free));
  }
  /// Asks for what the i-th call of allocate from now on writes of a row that was used before.
  void prefetch_to_allocate(std::size_t i) const noexcept {
    if (i >= free_.size()) return;
    const std::uint32_t row = free_[free_.size() - 1 - i];
    prefetch_key(row);
    prefetch_state(row);
  }
  /// Says whose such a row will be; from any thread.
  void set_key(std::uint32_t row, Key key) const noexcept { *keys_.at<Key>(row) = key; }
  /// As one call of allocate for each of the keys (N,) whose outcome is kInserted; `rows` are the
  /// next ones.
  void allocate_all(std::span<const std::uint32_t> rows, std::span<const Key> keys,
                    const Outcome* outcomes, RowState state) noexcept;
  /// As one call of allocate for each of these rows, which are the next ones and have keys.
  void allocate_all(std::span<const std::uint32_t> rows, RowState state) noexcept;
  /// Takes back the latest allocation that has not been taken back; `old_end` is end() from before
  /// the first of them.
  void undo_allocate(std::uint32_t row, RowNumber old_end) noexcept;
  /// Frees a row. While a lease older than `epoch` may use it, it is kept back.
  void free(std::uint32_t row, std::uint64_t epoch) noexcept;
  /// Gives rows freed before `epoch` back for allocation.
  void release_before(std::uint64_t epoch);

  void set_state(std::uint32_t row, RowState state) noexcept {
    visible_.assign_alone(row, state == RowState::kVisible);
    // Few tables ever have rows in flight: those of others stay untouched.
    const bool is_in_flight = state == RowState::kInFlight;
    if (in_flight_.test(row) != is_in_flight) in_flight_.assign_alone(row, is_in_flight);
  }
  RowState state(RowNumber row) const noexcept {
    if (visible_.test(row)) return RowState::kVisible;
    return in_flight_.test(row) ? RowState::kInFlight : RowState::kFree;
  }
  void prefetch_state(RowNumber row) const noexcept {
    visible_.prefetch(row);
    in_flight_.prefetch(row);
  }
  Key key(RowNumber row) const noexcept { return *keys_.at<Key>(row); }
  /// The words of metadata of a row.
  std::int64_t* meta(RowNumber row) const noexcept { return meta_->at<std::int64_t>(row); }
  RowAddresses meta() const noexcept { return meta_->addresses(); }
  void prefetch_key(RowNumber row) const noexcept { prefetch_line(keys_.at<Key>(row)); }
  void prefetch_meta(RowNumber row) const noexcept { prefetch_line(meta(row)); }
  void prefetch(RowNumber row) const noexcept {
    prefetch_key(row);
    prefetch_meta(row);
  }
  /// With metadata: a batch in flight has evicted the row's key, so the index no longer leads to
  /// it, but what else the row is to readers stays until the batch is visible.
  bool is_leaving(RowNumber row) const noexcept { return meta_ && leaving_.test(row); }
  void set_leaving(std::uint32_t row, bool value) noexcept { leaving_.assign_alone(row, value); }
  const RowBits& visible() const noexcept { return visible_; }
  /// The rows [kWordRows * i, ...) that have keys, but for those that are leaving, as bits.
  std::uint64_t used_word(std::int64_t i) const noexcept {
    const std::uint64_t used = visible_.word(i) | in_flight_.word(i);
    return meta_ ? used & ~leaving_.word(i) : used;
  }

  /// One past the highest row number ever given.
  RowNumber end() const noexcept { return end_.load(std::memory_order_relaxed); }
  RowAddresses keys() const noexcept { return keys_.addresses(); }
  /// Makes room for `count` rows in all, and backs it with memory now.
  void reserve(std::int64_t count);
  /// Backs with memory a huge page that new rows will need soon. False if there is none.
  bool populate_ahead() noexcept {
    return keys_.populate_ahead(end()) || (meta_ && meta_->populate_ahead(end()));
  }
  /// Backs with memory, on several threads, what is kept of the new rows among those that the next
  /// `count` calls of allocate give.
  void populate(std::int64_t count, int max_threads) const {
    const RowNumber last = end() + count - static_cast<std::int64_t>(reusable(count).size());
    keys_.populate_pages(end(), last, max_threads);
    if (meta_) meta_->populate_pages(end(), last, max_threads);
  }
  /// Rows that were needed or reserved so far; they can be addressed.
  std::int64_t num_prepared() const noexcept { return num_prepared_; }
  std::int64_t metadata_bytes() const noexcept;
  std::int64_t num_free() const noexcept {
    return static_cast<std::int64_t>(free_.size() + kept_back_.size());
  }
  const std::vector<std::uint32_t>& free_rows() const noexcept { return free_; }
  /// The rows used before that the next `count` calls of allocate may give again.
  std::span<const std::uint32_t> reusable(std::int64_t count) const noexcept {
    return std::span(free_).last(std::min(free_.size(), static_cast<std::size_t>(count)));
  }
  void swap(RowNumbers& other) noexcept;

 private:
  struct KeptBack {
    std::uint64_t epoch;
    std::uint32_t row;
  };

  static constexpr std::int64_t kSlabBytes = std::int64_t{4} << 20;

  void grow(std::int64_t count);

  Slabs keys_;
  std::optional<Slabs> meta_;  // apart, for calls that find keys touch it and not the keys
  RowBits visible_;
  RowBits in_flight_;
  RowBits leaving_;                  // with metadata
  std::vector<std::uint32_t> free_;  // the last is given next
  std::vector<KeptBack> kept_back_;  // in ascending order of epochs
  std::int64_t num_prepared_ = 0;    // rows that the slabs can address
  std::atomic<RowNumber> end_{0};    // read by checks of row numbers that hold no lock of the index
};

}  // namespace recsdk::internal
