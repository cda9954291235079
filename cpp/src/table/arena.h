// Memory of the index: runs of 4 KiB units cut from growing chunks. Freed runs join their free
// neighbours, since segments of several sizes come and go in waves, and what one size leaves must
// serve the next.
#pragma once

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

  /// `units` adjoining units with arbitrary content, or up to `spare` units more if what would
  /// be left of a free run is no longer than that: `units` is set to how many they are.
  /// Throws Error(kOutOfMemory), std::bad_alloc.
  std::byte* allocate(std::uint32_t& units, std::uint32_t spare = 0);
  /// Takes back what allocate(units) gave.
  void free(std::byte* block, std::uint32_t units) noexcept;
  /// Makes sure that `bytes` are free and backed by the system, as far as fresh memory is needed
  /// for that.
  void reserve(std::size_t bytes);
  /// Takes everything back and returns it to the system.
  void clear() noexcept;
  void swap(Arena& other) noexcept;

  /// Memory, not address space: what was ever given out, in pages of the system.
  std::size_t bytes_held() const noexcept;
  /// Of free runs.
  std::size_t bytes_free() const noexcept { return bytes_free_; }

 private:
  struct Chunk {
    Pages pages;
    std::size_t used = 0;  // bytes from the start that were ever given out
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
  Chunk& cut_off(std::size_t bytes);
  void release(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept;
  void link(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept;
  void unlink(Chunk& chunk, std::size_t unit) noexcept;
  FreeRun* find_run(std::uint32_t units) noexcept;

  std::vector<Chunk> chunks_;    // in ascending order of addresses
  std::byte* newest_ = nullptr;  // start of the only chunk with bytes that were never given out
  FreeRun* bins_[kNumBins] = {};
  std::size_t bytes_free_ = 0;
};

}  // namespace recsdk::internal
