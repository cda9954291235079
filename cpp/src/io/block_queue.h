// Blocks on their way to a sink, in order, written by a thread of its own where asked.
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

/// Memory for a block, at an address that is as far from a page's start as its place in the file
/// is: so a file can be given whole pages of it. Huge ones
/// where that goes past the page cache; a small file would pay for pages that it hardly fills.
class BlockBuffer {
 public:
  /// Makes room for `size` bytes that come at `offset` of the file; what they are is unspecified.
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
  /// What is not yet written is dropped.
  ~BlockQueue();

  /// To be called between pieces of what submit writes itself, through the page cache.
  void set_pause(std::function<void()> pause) { pause_ = std::move(pause); }

  /// A buffer to fill, of at least `size` bytes that come at `offset` of the file; waits for one
  /// that has been written. Throws what the sink has thrown.
  std::unique_ptr<BlockBuffer> acquire(std::int64_t size, std::int64_t offset);
  /// Writes the first `size` bytes, then recycles the buffer.
  void submit(std::unique_ptr<BlockBuffer> buffer, std::int64_t size);
  /// Gives a buffer back unwritten.
  void recycle(std::unique_ptr<BlockBuffer> buffer);
  /// Waits until all is written and ends the sink; returns the checksum of it.
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
