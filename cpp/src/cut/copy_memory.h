// Memory for the copies of rows that an open cut still needs.
//
// An update copies rows before it changes them, while training waits. Fresh memory costs more there
// than copying. So the thread that writes the cut touches memory ahead, and memory is used again
// once its rows are written: copies of neighbouring rows (a band) lie in chunks of their own, which
// are free when all rows of the band have been written. Pages are small, since huge ones may have
// to be made of others first; calls to the system are few, since all threads wait for a mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "util/memory.h"

namespace recsdk::internal {

/// Thread-safe, but for release and destruction beside an allocation in the same band.
class CopyMemory {
 public:
  explicit CopyMemory(std::int64_t num_bands);

  /// `head` bytes and then `count` times `each`, of arbitrary content, aligned to 8, until their
  /// band is released. `count` becomes as many as the current chunk has room for, at least 1, so
  /// that chunks are filled. Throws Error(kOutOfMemory), std::bad_alloc.
  std::byte* allocate(std::int64_t band, std::size_t head, std::size_t each, std::int64_t& count);
  /// Takes back all that was allocated in a band; returns how many bytes that was, each piece
  /// rounded up to a multiple of 8.
  std::int64_t release(std::int64_t band) noexcept;
  /// Readies one chunk more if less than about `bytes` are free; false if not, or if there is no
  /// memory. Takes hold_off_fork(), which the caller must not hold.
  bool stock(std::int64_t bytes) noexcept;

  static constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
  /// Takes back all that was allocated, in every band, and gives the system what is beyond `keep`
  /// bytes. False, with no more done than that nothing is allocated, while another thread readies a
  /// chunk. Nobody allocates meanwhile.
  bool recycle(std::int64_t keep) noexcept;

  /// Of all chunks that were needed or readied. Pieces that no chunk holds come on top.
  std::size_t chunk_bytes() const;

 private:
  struct Band {
    std::mutex mutex;
    std::vector<std::byte*> chunks;  // the last is being filled
    std::vector<Pages> large;        // for what no chunk holds
    std::size_t left = 0;            // bytes of the last chunk
    std::int64_t num_bytes = 0;      // allocated
  };
  static constexpr std::size_t kSlabBytes = std::size_t{16} << 20;
  static constexpr std::size_t kSlabChunks = kSlabBytes / kChunkBytes;

  static std::byte* allocate_large(Band& of, std::size_t bytes);
  std::byte* take_chunk();
  std::byte* take_fresh_chunk();

  const std::int64_t num_bands_;
  std::unique_ptr<Band[]> bands_;
  mutable std::mutex mutex_;       // of all that follows
  std::vector<Pages> slabs_;       // what chunks are cut from, the last one now
  std::size_t used_ = kSlabBytes;  // bytes of the last slab
  std::vector<std::byte*> free_;   // has room for all chunks there are
  std::size_t num_chunks_ = 0;
};

}  // namespace recsdk::internal
