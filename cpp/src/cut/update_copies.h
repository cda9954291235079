// The copies that one update makes for an open cut.
//
// Reading a row from memory is most of what a copy costs, and the update reads the same rows. So
// the memory for all copies is there before the update changes anything, which is when it may fail,
// and each row is copied just before it is updated.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cut/cut_state.h"

namespace recsdk::internal {

// In one piece of memory: this, then keys (count,), row numbers (count,), packed rows (count,).
struct CutState::CopyBlock {
  CopyBlock* next;
  std::int64_t count;
  std::int64_t row_bytes;

  // What a row takes, its copy and what says whose it is.
  static std::size_t bytes_each(std::int64_t row_bytes) {
    return sizeof(Key) + sizeof(std::uint32_t) + static_cast<std::size_t>(row_bytes);
  }
  // What so many rows take in one piece, a multiple of 8 bytes.
  static std::int64_t bytes_for(std::int64_t count, std::int64_t row_bytes) {
    const std::int64_t bytes = static_cast<std::int64_t>(sizeof(CopyBlock)) +
                               count * static_cast<std::int64_t>(bytes_each(row_bytes));
    return (bytes + 7) / 8 * 8;
  }
  // For `most` rows or fewer.
  static CopyBlock* make(CopyMemory& memory, std::int64_t band, std::int64_t most,
                         std::int64_t row_bytes) {
    std::byte* const place = memory.allocate(band, sizeof(CopyBlock), bytes_each(row_bytes), most);
    return new (place) CopyBlock{nullptr, most, row_bytes};
  }

  std::int64_t bytes() const { return bytes_for(count, row_bytes); }
  Key* keys() const { return reinterpret_cast<Key*>(const_cast<CopyBlock*>(this) + 1); }
  std::uint32_t* rows() const { return reinterpret_cast<std::uint32_t*>(keys() + count); }
  std::byte* packed(std::int64_t i) const {
    return reinterpret_cast<std::byte*>(rows() + count) + i * row_bytes;
  }
};

/// Holds the cut's mutex for as long as it lives, so that nobody else reads or copies rows; whoever
/// has it holds rows_mutex alone.
class CutState::UpdateCopies {
 public:
  /// There is nothing to copy.
  UpdateCopies() = default;

  bool is_empty() const noexcept { return blocks_.empty(); }
  /// If not 0, nothing was planned: so many bytes must find room first.
  std::int64_t bytes_to_wait_for() const noexcept { return bytes_to_wait_for_; }

  /// Copies the rows of one piece of the update, kUpdateGrain items. Different pieces may be copied
  /// side by side.
  class Piece {
   public:
    /// `end`: of the piece's items.
    Piece(const UpdateCopies& copies, std::int64_t piece, std::int64_t end) noexcept;
    /// Copies the pending rows of items [begin, end), which begins where the last call ended; both
    /// are the first items of rows, or the end of the piece.
    void copy(std::int64_t begin, std::int64_t end) noexcept;

   private:
    CutState& cut_;
    const GradItem* const items_;
    const std::int64_t end_;
    CopyBlock* const* block_;
    std::int64_t num_filled_ = 0;
  };

 private:
  friend class CutState;

  std::unique_lock<std::mutex> lock_;
  CutState* cut_ = nullptr;
  const GradItem* items_ = nullptr;
  std::vector<std::vector<CopyBlock*>> blocks_;  // of each piece, in the order of rows
  std::int64_t bytes_to_wait_for_ = 0;
};

}  // namespace recsdk::internal
