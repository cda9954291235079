// How often keys without a row were seen, about: a count-min sketch for each virtual shard.
//
// A sketch has kDepth rows of counters, and a key one counter in each. What a key is counted as is
// the least of its counters: never less than it was counted, and more only if each of them is
// shared with others. Counters of one column lie in one word, and a word is named by the
// virtual_shard_hash of a key that stands for it: the column above the 16 bits of the shard. So a
// word goes where the keys of its shard go.
//
// Why no conservative update, which counts less: what it counts depends on the order of keys.
// Source: G. Cormode and S. Muthukrishnan, "An improved data stream summary: the count-min sketch
// and its applications", Journal of Algorithms 55 (2005).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "recsdk/policy.h"
#include "recsdk/types.h"

namespace recsdk::internal {

/// Counters of all virtual shards that keys have come of. The index's lock guards it.
class CountSketch {
 public:
  static constexpr std::size_t kDepth = 4;
  static constexpr int kCounterBits = 16;
  using Cells = std::array<std::uint64_t, kDepth>;

  /// Counters end at `most`, up to kMostSketchCount.
  CountSketch(std::int64_t max_bytes, std::int64_t most);

  /// The words that have the counters of a key, by row.
  Cells cells_of(Key key) const noexcept;
  /// 0 where nothing was counted.
  std::uint64_t word(std::uint64_t cell) const noexcept;
  /// The counter of a row in a word.
  static std::int64_t counter(std::uint64_t word, std::size_t row) noexcept {
    return static_cast<std::int64_t>(word >> (row * kCounterBits) & 0xFFFFU);
  }
  /// Makes sure that `set` and `add` of the cell need no memory. Throws std::bad_alloc.
  void prepare(std::uint64_t cell);
  void set(std::uint64_t cell, std::uint64_t word) noexcept;
  /// Counts `count` occurrences of a key.
  void add(Key key, std::int64_t count) noexcept;
  void clear() noexcept { pages_.clear(); }
  /// Of the same size, in which nothing was counted.
  CountSketch empty_copy() const { return {width_, most_, Empty()}; }
  void swap(CountSketch& other) noexcept { pages_.swap(other.pages_); }

  /// A word as a record, under the key that stands for it.
  static AdmitRecord record(std::uint64_t cell, std::uint64_t word) noexcept;
  /// Whether a record may be a word of a sketch of this size.
  bool has_place_for(const AdmitRecord& record) const noexcept;
  /// Sets the word of a record, counters no further than they go here. Throws std::bad_alloc.
  void assign(const AdmitRecord& record);
  /// Calls `see(cell, word)` for each word that is not 0, in ascending order of shard and column.
  template <typename See>
  void for_each(See&& see) const {
    for (std::size_t page = 0; page < pages_.size(); ++page) {
      if (pages_[page] == nullptr) continue;
      for (std::uint64_t i = 0; i < kPageShards * width_; ++i) {
        const std::uint64_t shard = page * kPageShards + i / width_;
        if (pages_[page][i] != 0) see((i % width_) << 16U | shard, pages_[page][i]);
      }
    }
  }

  std::int64_t bytes() const noexcept;
  /// What is broken, or empty.
  std::string find_broken() const;

 private:
  struct Empty {};
  CountSketch(std::uint64_t width, std::int64_t most, Empty /*tag*/) : width_(width), most_(most) {}

  static constexpr std::uint64_t kPageShards = 64;  // a page has the words of so many shards

  std::uint64_t place(std::uint64_t cell) const noexcept {
    return (cell & 0xFFFFU) % kPageShards * width_ + (cell >> 16U);
  }
  static std::size_t page(std::uint64_t cell) noexcept { return (cell & 0xFFFFU) / kPageShards; }
  std::uint64_t capped(std::uint64_t word) const noexcept;

  std::uint64_t width_;  // of a shard
  std::int64_t most_;
  std::vector<std::unique_ptr<std::uint64_t[]>> pages_;  // null until something is counted there
};

}  // namespace recsdk::internal
