// Memory of the index: blocks of a few sizes cut from growing chunks, and reused by size.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "util/memory.h"

namespace recsdk::internal {

class Arena {
 public:
  /// A block of `bytes` (a multiple of 128), aligned to 128 bytes, with arbitrary content. Throws Error(kOutOfMemory).
  std::byte* allocate(std::size_t bytes);
  /// Takes a block back. Does not fail: room for the note was made by allocate.
  void free(std::byte* block, std::size_t bytes) noexcept;
  /// Makes `bytes` of fresh memory ready and backed by the system.
  void reserve(std::size_t bytes);

  std::size_t bytes_held() const noexcept { return bytes_held_; }

 private:
  void add_chunk(std::size_t bytes);

  struct FreeBlocks {
    std::vector<std::byte*> blocks;
    std::size_t num_made = 0;  // blocks of this size ever cut: the most that can be free at once
  };

  std::vector<Pages> chunks_;
  std::size_t used_ = 0;  // of the last chunk
  std::size_t bytes_held_ = 0;
  std::map<std::size_t, FreeBlocks> free_;
};

}  // namespace recsdk::internal
