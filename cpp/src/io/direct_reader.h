// Reads a file past the page cache, ahead of its user, who gets the bytes without a copy.
//
// Its user takes the blocks of a row file, which lie at nearly equal distances, each as a whole
// piece of memory of its own. So the reader guesses from the last blocks where the next ones begin,
// and cuts there what it reads ahead. It cannot guess compressed blocks, whose sizes change: it
// reads them ahead in pieces of equal size, and copies them out.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "io/block_memory.h"
#include "io/direct_io.h"

namespace recsdk::internal {

/// For one thread.
class DirectReader {
 public:
  /// Opens the descriptor's file anew, since the flag O_DIRECT belongs to an open file, and begins
  /// to read from `offset` on. If that fails, read and take give nothing. Throws
  /// Error(kOutOfMemory) or std::bad_alloc.
  DirectReader(int descriptor, std::int64_t offset);
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;
  ~DirectReader();

  /// Fills the front of `bytes`; returns how many: 0 at the end, after an error, or if `offset` is
  /// not within what has been read ahead.
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes);
  /// Bytes [offset, offset + size), without a copy; null if they are no piece: then call read.
  std::shared_ptr<const std::byte[]> take(std::int64_t offset, std::size_t size);

 private:
  // A stretch of the file that was, is or will be read in one go.
  struct Piece {
    std::int64_t start = 0;             // aligned; before
    std::int64_t begin = 0;             // what it is for, up to
    std::int64_t end = 0;               // where the next piece follows at the latest
    std::shared_ptr<std::byte[]> data;  // aligned; what the file has at `start`
    std::int64_t filled = 0;            // where what was read ends
    bool is_claimed = false;            // by a thread; changed under the mutex
    bool is_done = false;               // changed under the mutex
  };
  // A call of take.
  struct Part {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t size() const { return end - begin; }
  };

  std::shared_ptr<Piece> make_piece(std::int64_t begin, std::int64_t end);
  void drop_before(std::int64_t offset) noexcept;
  const Piece& wait_for_front(std::unique_lock<std::mutex>& lock);
  void plan(std::int64_t next, std::int64_t length) noexcept;
  void plan_after(const Part& part) noexcept;
  bool has_threads() const { return threads_[0].joinable(); }
  void serve() noexcept;
  void fill(Piece& piece) const noexcept;

  BlockMemory memory_;
  std::int64_t file_size_ = 0;
  Descriptor file_;
  std::optional<Part> last_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // In ascending order and without gaps; they may overlap.
  std::deque<std::shared_ptr<Piece>> pieces_;
  bool stopping_ = false;
  // Two, so that the disk has its next request when it has served one.
  std::array<std::thread, 2> threads_;
};

}  // namespace recsdk::internal
