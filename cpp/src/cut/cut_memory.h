// What a table keeps from one cut for the next.
//
// Fresh memory is what makes updates beside a cut slow: the system clears a page at its first
// touch, and a virtual machine may have to ask its host for it first, which takes ten times as
// long. So what a cut needs of bits and of memory for copies is readied by and by, while the table
// is trained, and stays with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>

#include "cut/copy_memory.h"
#include "index/change_tracker.h"
#include "rows/row_bits.h"

namespace recsdk::internal {

/// Bands of rows whose copies are freed together, in every cut.
inline constexpr std::int64_t kNumCopyBands = 32;

/// Thread-safe.
class CutMemory {
 public:
  /// `row_bytes`: of a row's copy, and of what says whose it is.
  CutMemory(std::uint64_t hash_seed, std::int64_t row_bytes)
      : hash_seed_(hash_seed), row_bytes_(row_bytes) {}

  /// All that one cut needs.
  struct Parts {
    std::unique_ptr<ChangeTracker> tracker;  // of the time after the cut: nothing has changed
    std::unique_ptr<RowBits> pending;        // all clear
    std::shared_ptr<CopyMemory> copies;      // nothing is allocated
    std::uint64_t ticket = 0;                // says for which cut they were taken
  };

  /// Parts for a cut of `num_rows` rows: what is kept, else new ones. From now on no more memory
  /// for copies is kept or readied than `max_copy_bytes`. Throws Error(kOutOfMemory),
  /// std::bad_alloc.
  Parts take(std::int64_t num_rows, std::optional<std::int64_t> max_copy_bytes);
  /// Keeps the parts that were taken last, unless they were forgotten, for a cut of about
  /// `num_rows` rows; best effort. A tracker need not be clean, the others are, and any may be
  /// null.
  void keep(Parts parts, std::int64_t num_rows) noexcept;
  /// Readies some of what a cut of `num_rows` rows would need, unless one is open: of bits a piece,
  /// of memory for copies a sixteenth of what the largest update needs. Tables below 2 MiB need
  /// none. Best effort. Takes hold_off_fork(), which the caller must not hold.
  void ready_some(std::int64_t num_rows) noexcept;

  /// Returns what is kept and forgets what was taken: the table has other rows from now on, or
  /// there was no memory for a cut.
  Parts forget() noexcept;

  /// An update changes this many rows.
  void note_update(std::int64_t num_rows) noexcept {
    if (num_rows > most_rows()) most_rows_.store(num_rows, std::memory_order_relaxed);
  }
  /// The most rows that an update has changed so far.
  std::int64_t most_rows() const noexcept { return most_rows_.load(std::memory_order_relaxed); }
  /// Bytes of the copies of the largest update so far.
  std::int64_t bytes_at_once() const noexcept { return most_rows() * row_bytes_; }
  /// Memory for copies that a table of `num_rows` rows should have ready: for two updates, the
  /// second of which may come before the thread that writes could ready more.
  std::int64_t bytes_for_copies(std::int64_t num_rows) const noexcept {
    return std::min(most_to_ready(num_rows * row_bytes_, bytes_at_once()), limit_.load());
  }
  static std::int64_t most_to_ready(std::int64_t bytes_of_rows, std::int64_t at_once) noexcept;

  /// Memory that is kept.
  std::int64_t bytes() const;

 private:
  void complete(Parts& parts, std::int64_t num_rows) const;
  bool is_ready(std::int64_t num_rows) const noexcept {
    return num_rows <= ready_rows_.load(std::memory_order_relaxed) &&
           most_rows() <= ready_most_rows_.load(std::memory_order_relaxed);
  }

  const std::uint64_t hash_seed_;
  const std::int64_t row_bytes_;
  std::atomic<std::int64_t> most_rows_{0};
  std::atomic<std::int64_t> limit_{std::numeric_limits<std::int64_t>::max()};
  // What is kept, or open, was ready for a table of so many rows and updates of so many.
  std::atomic<std::int64_t> ready_rows_{0};
  std::atomic<std::int64_t> ready_most_rows_{0};
  mutable std::mutex mutex_;  // of what follows
  Parts kept_;
  bool is_taken_ = false;     // by a cut that is open
  std::uint64_t ticket_ = 0;  // counts what is taken and forgotten
};

}  // namespace recsdk::internal
