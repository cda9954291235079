// Rows of batches in flight that have keys, and no values yet.
#pragma once

#include <atomic>
#include <cstdint>

#include "rows/row_bits.h"

namespace recsdk::internal {

/// A set of row numbers. One thread adds; any thread tests and takes meanwhile.
class WaitingRows {
 public:
  /// Makes rows [0, end) addressable. Throws Error(kOutOfMemory), std::bad_alloc.
  void grow(std::int64_t end) { bits_.grow(end); }

  /// Rows [0, end) are addressable.
  std::int64_t end() const noexcept { return bits_.num_words() * kWordRows; }

  bool is_empty() const noexcept { return count_.load(std::memory_order_relaxed) == 0; }
  bool test(std::int64_t row) const noexcept { return bits_.test(row); }
  void add(std::int64_t row) noexcept {
    if (bits_.test(row)) return;
    bits_.set(row);
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  /// Takes a row out; true if it was there. Of one row one thread at a time.
  bool take(std::int64_t row) noexcept {
    if (!bits_.test(row)) return false;
    bits_.clear(row);
    count_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  /// Nobody adds or takes meanwhile.
  void clear() noexcept {
    if (is_empty()) return;
    bits_.clear_beside_tests();
    count_.store(0, std::memory_order_relaxed);
  }
  std::int64_t bytes() const noexcept { return bits_.bytes(); }

 private:
  RowBits bits_;
  std::atomic<std::int64_t> count_{0};
};

}  // namespace recsdk::internal
