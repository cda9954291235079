// Blocks on their way to a sink, in order; a thread of its own writes them if asked to.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/checksum.h"
#include "recsdk/row_file.h"
#include "util/memory.h"

namespace recsdk::internal {

/// Memory for a block. Its address is as far from a page's start as its place in the file is, so
/// whole pages of it can go to the file. The pages are huge where writing goes past the page cache;
/// a small file would hardly fill them.
class BlockBuffer {
 public:
  /// Makes room for `size` bytes, of unspecified content, for `offset` of the file.
  void resize(std::int64_t size, std::int64_t offset);
  std::byte* data() noexcept { return data_; }

 private:
  Pages memory_;
  bool is_huge_ = false;
  std::byte* data_ = nullptr;
};

/// Not thread-safe: one thread acquires and submits.
class BlockQueue {
 public:
  BlockQueue(ByteSink& sink, bool in_background);
  BlockQueue(const BlockQueue&) = delete;
  BlockQueue& operator=(const BlockQueue&) = delete;
  /// Drops what is not yet written.
  ~BlockQueue();

  /// `pause` is called between the pieces that submit itself writes through the page cache.
  void set_pause(std::function<void()> pause) { pause_ = std::move(pause); }

  /// A buffer to fill, of at least `size` bytes for `offset` of the file; waits until one is
  /// written if all are in use. Throws what the sink has thrown.
  std::unique_ptr<BlockBuffer> acquire(std::int64_t size, std::int64_t offset);
  /// Writes the first `size` bytes, then recycles the buffer.
  void submit(std::unique_ptr<BlockBuffer> buffer, std::int64_t size);
  /// Gives a buffer back unwritten.
  void recycle(std::unique_ptr<BlockBuffer> buffer);
  /// Waits until all is written, and ends the sink; returns the checksum of all bytes.
  std::string drain();

 private:
  struct Item {
    std::unique_ptr<BlockBuffer> buffer;
    std::size_t size = 0;
  };
  void serve();
  void write(const Item& item);
  void rethrow();

  ByteSink& sink_;
  std::function<void()> pause_;
  std::int64_t num_written_ = 0;
  StreamChecksum checksum_;  // of what was submitted
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::vector<std::unique_ptr<BlockBuffer>> free_;
  int num_out_ = 0;  // buffers submitted or being written
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace recsdk::internal
