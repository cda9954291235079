// Memory of blocks that are read. It is used again for later blocks once nobody uses it any more,
// since fresh memory takes as much time as reading from a fast disk. It lies in huge pages: past
// the page cache each stretch of memory is a request of its own to the disk, and for small pages
// the requests take longer than the data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "util/memory.h"

namespace recsdk::internal {

/// Thread-safe. Memory taken from it may outlive it.
class BlockMemory {
 public:
  BlockMemory();

  /// `bytes` of arbitrary content, aligned to 4096. Throws Error(kOutOfMemory) or std::bad_alloc.
  std::shared_ptr<std::byte[]> take(std::int64_t bytes);

 private:
  /// Blocks kept for later: as many as are under way at a time, none of unusual size.
  struct Free {
    const int process;  // others keep nothing: a child of fork may find the lock taken
    std::mutex mutex;
    std::array<Pages, 8> pages;
  };
  static void give_back(Free& free, Pages pages) noexcept;

  std::shared_ptr<Free> free_;
};

}  // namespace recsdk::internal
