// An arena that several threads use at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "keymap/arena.h"

namespace recsdk::internal {

/// Guards an arena while it lives. Memory used before is given out under the lock; memory that is
/// new goes to each thread by the huge page, so that no two threads wait for the system to clear
/// the same one. What is left of them goes back at the end.
class SharedArena {
 public:
  explicit SharedArena(Arena& arena) noexcept : arena_(arena) {}
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;
  ~SharedArena();

  /// As those of Arena; any thread may call them at any time.
  std::byte* allocate(std::uint32_t& units, std::uint32_t less);
  void free(std::byte* block, std::uint32_t units) noexcept;

 private:
  // Memory that only one thread takes from.
  struct Extent {
    std::thread::id owner;
    std::byte* begin = nullptr;
    std::uint32_t units = 0;
  };

  Extent& mine();
  void give_back(Extent& extent) noexcept;

  std::mutex mutex_;
  Arena& arena_;
  std::vector<Extent> extents_;  // one for each thread that came by
};

}  // namespace recsdk::internal
