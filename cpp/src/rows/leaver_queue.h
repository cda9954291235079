// Rows that left and are yet to be read: a ring of a fixed size, filled under the index's lock and
// read without it.
//
// A key that leaves takes a place at once and waits there while a lease may use its row; then the
// row is copied. With a queue that is not to lose any, a call first reserves places for all that it
// will make leave. So nothing fails once keys have left. Of an index there is nothing to copy: who
// takes row numbers keeps their places until the rows are copied and read.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recsdk/leavers.h"
#include "recsdk/types.h"
#include "util/event.h"
#include "util/unset_allocator.h"

namespace recsdk::internal {

class LeaverQueue {
 public:
  /// Copies a row's weights (D,) and state (S,).
  using ReadRow = std::function<void(std::uint32_t row, float* weights, float* state)>;

  /// What a table's rows have of numbers.
  struct Widths {
    std::int64_t weights = 0;
    std::int64_t state = 0;
  };

  /// `widths` of a table's rows; none: of an index, whose rows the caller keeps. Throws
  /// std::invalid_argument for a bad option, std::bad_alloc.
  LeaverQueue(const LeaversOptions& options, std::string title, std::optional<Widths> widths);

  const LeaversOptions& options() const noexcept { return options_; }

  // Under the index's lock, alone.
  /// Reserves a place for each of `count` keys that will leave, if none is to be lost; returns how
  /// many it reserved. Throws Error(kCapacity), or Error(kBusy) after waiting.
  std::int64_t reserve(std::int64_t count);
  void cancel(std::int64_t num_reserved) noexcept;
  /// The key has left; leases before `epoch` may use its row.
  void note(Key key, std::uint32_t row, LeaveCause cause, std::uint64_t epoch) noexcept;
  /// True if some key left before `epoch` whose row is yet to be copied.
  bool has_waiting(std::uint64_t epoch) const noexcept;
  /// Ends the wait of keys that left before `epoch`, whose rows nobody uses any more, and copies
  /// the rows of a table.
  void copy_before(std::uint64_t epoch, const ReadRow& read_row) noexcept;

  // From any thread.
  void close() noexcept;
  bool is_closed() const;
  std::int64_t read(const LeaversBuffer& buffer);
  std::int64_t take(const LeaversBuffer& buffer);
  void free_rows(std::int64_t count) noexcept;
  /// Takes hold_off_fork(), which the caller must not hold.
  bool wait(double at_most) const;
  std::int64_t size() const;
  std::uint64_t num_lost() const;
  std::uint64_t num_ended() const;

 private:
  struct Leaving {
    Key key = 0;
    std::uint64_t epoch = 0;
    std::uint32_t row = 0;
    LeaveCause cause = LeaveCause::kEvicted;
  };
  template <typename T>
  using Places = std::vector<T, UnsetAllocator<T>>;

  std::int64_t num_places() const noexcept {
    return options_.max_rows - num_held_ - num_taken_ - num_reserved_;
  }
  /// Places that reading can give back while this call waits.
  std::int64_t num_readable() const noexcept { return num_taken_ + (has_rows_ ? num_ready_ : 0); }
  /// Why reading does not give back `count` places.
  std::string why_not_by_reading(std::int64_t count) const;
  /// Takes rows out of the ring; the mutex is held.
  std::int64_t pop(const LeaversBuffer& buffer);
  void check(const LeaversBuffer& buffer) const;
  std::size_t place(std::int64_t i) const noexcept {
    return static_cast<std::size_t>((first_ + i) % options_.max_rows);
  }
  void copy_out(const LeaversBuffer& buffer, std::int64_t count) const;

  const LeaversOptions options_;
  const std::string title_;
  const bool has_rows_;  // of a table
  const std::int64_t dim_;
  const std::int64_t state_width_;

  mutable std::mutex mutex_;
  Event has_ready_;
  std::condition_variable has_places_;
  // A ring: from `first_` on num_ready_ rows can be read, up to num_held_ leases may use the rows.
  Places<Leaving> leaving_;
  Places<float> weights_;  // (max_rows, D)
  Places<float> state_;    // (max_rows, S)
  std::int64_t first_ = 0;
  std::int64_t num_ready_ = 0;
  std::int64_t num_held_ = 0;
  std::int64_t num_taken_ = 0;  // which are out of the ring
  std::int64_t num_reserved_ = 0;
  std::uint64_t num_lost_ = 0;
  std::uint64_t num_ended_ = 0;
  bool is_closed_ = false;
};

}  // namespace recsdk::internal
