// Memory of blocks that are read: taken again for later blocks once nobody uses it any more, since
// fresh memory costs as much time as reading from a fast disk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "embedding/buffer.h"

namespace recsdk::internal {

/// Thread-safe. What it has given may outlive it.
class BlockMemory {
 public:
  BlockMemory() : free_(std::make_shared<Free>()) {}

  /// `bytes` of arbitrary content, aligned to 64. Throws std::bad_alloc.
  std::shared_ptr<std::byte[]> take(std::int64_t bytes);

 private:
  /// Kept for later: as many blocks as are under way at a time, none of unusual size.
  struct Free {
    std::mutex mutex;
    std::array<std::unique_ptr<Buffer<std::byte>>, 8> buffers;
  };
  static void give_back(Free& free, std::unique_ptr<Buffer<std::byte>> buffer) noexcept;

  std::shared_ptr<Free> free_;
};

}  // namespace recsdk::internal
