// One bit per row, in words of 64.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "rows/slabs.h"
#include "util/prefetch.h"

namespace recsdk::internal {

inline constexpr std::int64_t kWordRows = 64;

inline std::uint64_t bit_of(std::int64_t row) {
  return std::uint64_t{1} << (static_cast<std::uint64_t>(row) % 64);
}

/// Sets bits of a word that other threads may set or clear bits of.
inline void set_bits(std::uint64_t& word, std::uint64_t mask) noexcept {
  const std::atomic_ref shared(word);
  if ((shared.load(std::memory_order_relaxed) & mask) != mask)
    shared.fetch_or(mask, std::memory_order_relaxed);
}

/// A growing array of bits that never moves. Bits are set from any thread, also beside grow.
class RowBits {
 public:
  RowBits() : words_(sizeof(std::uint64_t), 0, kSlabBytes) {}

  /// Makes bits [0, num_rows) addressable; new ones are clear.
  void grow(std::int64_t num_rows) {
    const std::int64_t needed = (num_rows + kWordRows - 1) / kWordRows;
    if (needed <= num_words_) return;
    words_.grow(needed);
    num_words_ = needed;
  }
  std::int64_t num_words() const noexcept { return num_words_; }
  std::uint64_t& word(std::int64_t i) const noexcept { return *words_.at<std::uint64_t>(i); }

  bool test(std::int64_t row) const noexcept {
    return (load_word(row / kWordRows) & bit_of(row)) != 0;
  }
  /// A copy of what leads to the words, for loops that write to other memory.
  RowAddresses words() const noexcept { return words_.addresses(); }
  void prefetch(std::int64_t row) const noexcept { prefetch_line(&word(row / kWordRows)); }
  void set(std::int64_t row) const noexcept { set_bits(word(row / kWordRows), bit_of(row)); }
  /// Sets those of sorted items [begin, end). Most are set already, so that is looked at first; of
  /// the others a word is gathered before it is written once.
  void set(const GradItem* items, std::int64_t begin, std::int64_t end) const noexcept {
    const RowAddresses addresses = words();
    const auto word_of = [&](std::int64_t row) -> std::uint64_t& {
      return *reinterpret_cast<std::uint64_t*>(addresses.record(row / kWordRows));
    };
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t row = items[i].row;
      std::uint64_t& word = word_of(row);
      if ((std::atomic_ref(word).load(std::memory_order_relaxed) & bit_of(row)) != 0) {
        ++i;
        continue;
      }
      std::uint64_t mask = 0;
      for (; i < end && items[i].row / kWordRows == row / kWordRows; ++i)
        mask |= bit_of(items[i].row);
      set_bits(word, mask);
    }
  }
  void clear(std::int64_t row) const noexcept {
    std::atomic_ref(word(row / kWordRows)).fetch_and(~bit_of(row), std::memory_order_relaxed);
  }
  /// The bits of word i, which other threads may set and clear.
  std::uint64_t load_word(std::int64_t i) const noexcept {
    return std::atomic_ref(word(i)).load(std::memory_order_relaxed);
  }
  /// Clears the bits of word i, and returns which were set.
  std::uint64_t take_word(std::int64_t i) const noexcept {
    return load_word(i) == 0 ? 0 : std::atomic_ref(word(i)).exchange(0, std::memory_order_relaxed);
  }
  /// The same where nobody else uses bits of the same word.
  void assign_alone(std::int64_t row, bool value) const noexcept {
    std::uint64_t& shared = word(row / kWordRows);
    shared = value ? shared | bit_of(row) : shared & ~bit_of(row);
  }
  /// Sets the bits [begin, end) where nobody else uses bits of the same words.
  void set_all_alone(std::int64_t begin, std::int64_t end) const noexcept {
    while (begin < end) {
      const std::int64_t last = std::min(end, (begin / kWordRows + 1) * kWordRows);
      const std::uint64_t below_last = last % kWordRows == 0 ? 0 : bit_of(last);
      word(begin / kWordRows) |= below_last - bit_of(begin);  // modulo 2^64
      begin = last;
    }
  }
  /// Clears all bits, which also backs them with memory. Nobody else uses them.
  void clear_all() noexcept {
    for (std::int64_t i = 0; i < num_words_; ++i) word(i) = 0;
    num_backed_ = num_words_;
  }
  /// Clears all bits, while other threads may test them.
  void clear_beside_tests() const noexcept {
    for (std::int64_t i = 0; i < num_words_; ++i) {
      const std::atomic_ref shared(word(i));
      if (shared.load(std::memory_order_relaxed) != 0) shared.store(0, std::memory_order_relaxed);
    }
  }
  /// Backs 256 KiB of bits that are clear with memory; true once all are. Nobody else uses them.
  bool back_some() noexcept {
    const std::int64_t last = std::min(num_words_, num_backed_ + kWordsToBack);
    for (; num_backed_ < last; ++num_backed_) word(num_backed_) = 0;
    return num_backed_ == num_words_;
  }
  /// Backs the bits [begin, end) with memory now. Best effort.
  void populate(std::int64_t begin, std::int64_t end) const noexcept {
    words_.populate(begin / kWordRows, (end + kWordRows - 1) / kWordRows);
  }
  std::int64_t bytes() const noexcept {
    return num_words_ * static_cast<std::int64_t>(sizeof(std::uint64_t));
  }

 private:
  static constexpr std::int64_t kWordsToBack = 32'768;
  static constexpr std::int64_t kSlabBytes = std::int64_t{1} << 20;
  Slabs words_;
  std::int64_t num_words_ = 0;
  std::int64_t num_backed_ = 0;  // words, at least, whose memory was touched
};

}  // namespace recsdk::internal
