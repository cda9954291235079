// Memory of the index: runs of 4 KiB units cut from growing chunks. Freed runs join their free
// neighbours, since segments of several sizes come and go in waves, and what one size leaves must
// serve the next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "util/memory.h"

namespace recsdk::internal {

class Arena {
 public:
  static constexpr std::size_t kUnit = 4096;

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// `units` adjoining units with arbitrary content. Up to `less` fewer will do if a free run is
  /// just as long: `units` is set to how many they are. Throws Error(kOutOfMemory), std::bad_alloc.
  std::byte* allocate(std::uint32_t& units, std::uint32_t less = 0);
  /// Takes back what allocate(units) gave.
  void free(std::byte* block, std::uint32_t units) noexcept;
  /// The same from what was used before; null if there is no such run.
  std::byte* allocate_used(std::uint32_t& units, std::uint32_t less) noexcept;
  /// Memory that was never given out, `units` or more of it: up to the next huge page, so that
  /// those who take some each touch pages of their own. `units` is set to how many they are; free
  /// takes back any part. Throws as allocate.
  std::byte* take_fresh(std::uint32_t& units);
  /// Whether so many calls of allocate(units) would be served from what was used before.
  bool has_runs(std::uint32_t units, std::uint32_t count) const noexcept;
  /// A used block between two free runs that make one of `units` or more once the block is moved to
  /// the start of the first; null if a short search finds none. `units_of(block)` is its length.
  template <typename UnitsOf>
  std::byte* find_between_runs(std::uint32_t units, const UnitsOf& units_of) noexcept;
  /// Moves the content of such a block there, and returns where it is now.
  std::byte* move_down(std::byte* block, std::uint32_t units) noexcept;
  /// Makes sure that `bytes` are free; fresh memory that this takes is backed by the system.
  void reserve(std::size_t bytes);
  /// In a large arena: backs the next huge page with memory, once half of the one before has been
  /// given out. Calls now and then keep allocations from meeting several such pages in a row, each
  /// of which takes the system a while to clear. False if there is nothing to do.
  bool populate_ahead() noexcept;
  /// Takes everything back and returns it to the system.
  void clear() noexcept;
  void swap(Arena& other) noexcept;

  /// Memory, not address space: what was ever given out, in pages of the system.
  std::size_t bytes_held() const noexcept;
  /// Of free runs.
  std::size_t bytes_free() const noexcept { return bytes_free_; }
  /// Of blocks that are given out.
  std::size_t bytes_given() const noexcept;

 private:
  struct Chunk {
    Pages pages;
    std::size_t used = 0;       // bytes from the start that were ever given out
    std::size_t populated = 0;  // bytes from the start, beyond those used, that are backed as well
    // Of each unit that begins or ends a free run: the run's length; else 0.
    std::vector<std::uint32_t> free_lengths;
  };
  // Written into the first unit of a free run.
  struct FreeRun {
    FreeRun* previous;
    FreeRun* next;
    std::uint32_t units;
  };
  // Runs of 1, 2, ... units, and in bin 0 those of kNumBins or more.
  static constexpr std::uint32_t kNumBins = 33;

  static std::uint32_t bin_of(std::uint32_t units) { return units < kNumBins ? units : 0; }
  static std::size_t unit_of(const Chunk& chunk, const void* block);
  Chunk& chunk_of(const std::byte* block) noexcept;
  Chunk& add_chunk(std::size_t bytes);
  Chunk& chunk_with(std::size_t bytes);
  Chunk& cut_off(std::size_t bytes);
  void release(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept;
  void link(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept;
  void unlink(Chunk& chunk, std::size_t unit) noexcept;
  FreeRun* find_run(std::uint32_t units, std::uint32_t less) const noexcept;

  std::vector<Chunk> chunks_;    // in ascending order of addresses
  std::byte* newest_ = nullptr;  // start of the only chunk with bytes that were never given out
  FreeRun* bins_[kNumBins] = {};
  std::size_t bytes_free_ = 0;
};

template <typename UnitsOf>
std::byte* Arena::find_between_runs(std::uint32_t units, const UnitsOf& units_of) noexcept {
  constexpr int kMostRuns = 48;
  int num_seen = 0;
  for (std::uint32_t bin = std::min(units, kNumBins) - 1; bin > 0; --bin) {
    for (FreeRun* run = bins_[bin]; run != nullptr; run = run->next) {
      if (++num_seen > kMostRuns) return nullptr;
      auto* const block = reinterpret_cast<std::byte*>(run) + run->units * kUnit;
      const Chunk& chunk = chunk_of(reinterpret_cast<std::byte*>(run));
      if (block == chunk.pages.data() + chunk.used) continue;
      const std::size_t behind = unit_of(chunk, block) + units_of(block);
      const std::uint32_t next =
          behind < chunk.free_lengths.size() ? chunk.free_lengths[behind] : 0;
      if (next < units && run->units + next >= units) return block;
    }
  }
  return nullptr;
}

}  // namespace recsdk::internal
