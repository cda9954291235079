// Reads a file past the page cache, ahead of its user, who has what was read without a copy.
//
// Its user takes parts that lie at nearly equal distances, the blocks of a row file, each a whole
// piece of memory of its own. So what is read ahead is cut where the next parts begin, as it seems
// from the last ones. Parts of changing sizes, compressed ones, are not foreseen: they are read
// ahead in pieces of equal size, and copied out of them.
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
  /// Opens the descriptor's file anew, since the flag belongs to what is open, and begins to read
  /// from `offset` on. Where that fails there is nothing to read. Throws Error(kOutOfMemory) or
  /// std::bad_alloc.
  DirectReader(int descriptor, std::int64_t offset);
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;
  ~DirectReader();

  /// Fills the front of `bytes`; returns how many: 0 at the end, after an error, or if `offset` is
  /// not within what has been read ahead.
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes);
  /// Bytes [offset, offset + size) where they were read to, or null: then read may give them.
  std::shared_ptr<const std::byte[]> take(std::int64_t offset, std::size_t size);

 private:
  // A part of the file that was, is or will be read in one go.
  struct Piece {
    std::int64_t start = 0;             // aligned; before
    std::int64_t begin = 0;             // what it is for, up to
    std::int64_t end = 0;               // where the next piece follows at the latest
    std::shared_ptr<std::byte[]> data;  // aligned; what the file has at `start`
    std::int64_t filled = 0;            // where what was read ends
    bool is_claimed = false;            // by a thread; changed under the mutex
    bool is_done = false;               // changed under the mutex
  };
  // A take that was asked for.
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
  // In ascending order; none begins behind the end of the one before.
  std::deque<std::shared_ptr<Piece>> pieces_;
  bool stopping_ = false;
  // Two, so that the disk has the next request when it has served one.
  std::array<std::thread, 2> threads_;
};

}  // namespace recsdk::internal
