// Blocks reach the sink in order, whole or in pieces, and errors on the way reach the caller.
#include "io/block_queue.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "io/direct_io.h"
#include "row_files_in_memory.h"

namespace recsdk::test::block_queue_test {
namespace {

using internal::BlockQueue;
using internal::kDirectFrom;

constexpr std::size_t kPiece = std::size_t{256} << 10;

/// What happens to a sink, in order.
struct Event {
  enum Kind { kSubmit, kWrite, kPause } kind;
  std::size_t size;
};

/// Keeps what is written and tells of it; `before` is called before each write and may throw.
class TellingSink final : public ByteSink {
 public:
  explicit TellingSink(std::vector<Event>* events = nullptr) : events_(events) {}
  void write(std::span<const std::byte> bytes) override {
    if (before) before();
    if (events_ != nullptr) events_->push_back({Event::kWrite, bytes.size()});
    content.insert(content.end(), bytes.begin(), bytes.end());
  }
  void finish() override { ++num_finished; }

  std::function<void()> before;
  Bytes content;
  int num_finished = 0;

 private:
  std::vector<Event>* events_;
};

Bytes made_bytes(std::size_t size) {
  Bytes bytes(size);
  std::uint64_t state = size;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

/// Sizes about those of pieces, and then more than goes through the page cache.
const std::vector<std::size_t> kSizes = {1,          kPiece - 1,    kPiece, kPiece + 1, 0,
                                         kPiece,     kPiece,        kPiece, kPiece,     2 * kPiece,
                                         3'000'000,  2'000'000,     77,     3'000'000,  1'500'000,
                                         kPiece + 5, 2 * kPiece + 1};

std::size_t sum(const std::vector<std::size_t>& sizes) {
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size;
  return total;
}

/// Submits the bytes in blocks of these sizes.
void submit_all(BlockQueue& queue, const Bytes& bytes, const std::vector<std::size_t>& sizes,
                std::vector<Event>* events = nullptr) {
  std::size_t done = 0;
  for (const std::size_t size : sizes) {
    auto buffer = queue.acquire(static_cast<std::int64_t>(size), static_cast<std::int64_t>(done));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % internal::kDirectAlignment,
              done % internal::kDirectAlignment);
    std::copy_n(bytes.data() + done, size, buffer->data());
    if (events != nullptr) events->push_back({Event::kSubmit, size});
    queue.submit(std::move(buffer), static_cast<std::int64_t>(size));
    done += size;
  }
}

std::string checksum_of(const Bytes& bytes) {
  internal::StreamChecksum checksum;
  checksum.add(bytes);
  return checksum.text();
}

TEST(BlockQueueTest, BytesComeInOrderWithTheirChecksum) {
  const Bytes bytes = made_bytes(sum(kSizes));
  for (const bool in_background : {false, true}) {
    TellingSink sink;
    BlockQueue queue(sink, in_background);
    submit_all(queue, bytes, kSizes);
    queue.recycle(queue.acquire(10, 0));  // writes nothing
    EXPECT_EQ(queue.drain(), checksum_of(bytes));
    EXPECT_TRUE(sink.content == bytes);
    EXPECT_EQ(sink.num_finished, 1);
  }
}

TEST(BlockQueueTest, WithoutAPauseABlockIsOneWrite) {
  std::vector<Event> events;
  TellingSink sink(&events);
  BlockQueue queue(sink, false);
  submit_all(queue, made_bytes(sum(kSizes)), kSizes);
  ASSERT_EQ(events.size(), kSizes.size());
  for (std::size_t i = 0; i < kSizes.size(); ++i) EXPECT_EQ(events[i].size, kSizes[i]);
}

// What comes between the submits of two blocks.
struct Written {
  std::vector<std::size_t> pieces;
  std::size_t num_pauses = 0;
};

std::vector<Written> by_block(const std::vector<Event>& events) {
  std::vector<Written> blocks;
  bool was_pause = true;  // which is neither the first nor the last of a block, nor twice in a row
  for (const Event& event : events) {
    if (event.kind == Event::kSubmit) {
      EXPECT_EQ(was_pause, blocks.empty());
      blocks.emplace_back();
      was_pause = true;
      continue;
    }
    const bool is_pause = event.kind == Event::kPause;
    EXPECT_FALSE(is_pause && was_pause);
    was_pause = is_pause;
    if (is_pause) {
      ++blocks.back().num_pauses;
    } else {
      blocks.back().pieces.push_back(event.size);
    }
  }
  EXPECT_FALSE(was_pause);
  return blocks;
}

TEST(BlockQueueTest, ThePauseComesBetweenThePiecesOfABlock) {
  const Bytes bytes = made_bytes(sum(kSizes));
  std::vector<Event> events;
  TellingSink sink(&events);
  BlockQueue queue(sink, false);
  queue.set_pause([&] { events.push_back({Event::kPause, 0}); });
  submit_all(queue, bytes, kSizes, &events);
  EXPECT_EQ(queue.drain(), checksum_of(bytes));
  EXPECT_TRUE(sink.content == bytes);
  const std::vector<Written> blocks = by_block(events);
  ASSERT_EQ(blocks.size(), kSizes.size());
  constexpr auto kBorder = static_cast<std::size_t>(kDirectFrom);
  std::size_t begin = 0;
  bool crosses_border = false;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Written& block = blocks[i];
    EXPECT_EQ(sum(block.pieces), kSizes[i]);
    EXPECT_EQ(block.num_pauses + 1, block.pieces.size());
    const bool is_through_cache = begin < kBorder;
    for (const std::size_t piece : block.pieces) {
      EXPECT_TRUE(piece <= kPiece || begin >= kBorder);
      crosses_border = crosses_border || (is_through_cache && begin >= kBorder);
      begin += piece;
    }
    // Past the page cache it waits for the disk only.
    EXPECT_TRUE(is_through_cache || block.pieces.size() == 1);
  }
  EXPECT_TRUE(crosses_border);  // a block of which the rest was written in one
}

TEST(BlockQueueTest, APauseMayTakeItsTimeAndSeesWhatIsWritten) {
  const std::vector<std::size_t> sizes = {5 * kPiece, 3 * kPiece + 1};
  const Bytes bytes = made_bytes(sum(sizes));
  TellingSink sink;
  BlockQueue queue(sink, false);
  std::size_t seen = 0;
  queue.set_pause([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(sink.content.size() - seen, seen == 4 * kPiece ? 2 * kPiece : kPiece);
    seen = sink.content.size();
  });
  submit_all(queue, bytes, sizes);
  EXPECT_EQ(seen, 8 * kPiece);
  EXPECT_EQ(queue.drain(), checksum_of(bytes));
  EXPECT_TRUE(sink.content == bytes);
}

TEST(BlockQueueTest, WhatAPauseThrowsReachesTheCallerOfSubmit) {
  const Bytes bytes = made_bytes(10 * kPiece);
  for (std::size_t n = 0; n < 8; ++n) {  // four in each block
    TellingSink sink;
    {
      BlockQueue queue(sink, false);
      std::size_t num_left = n;
      queue.set_pause([&] {
        if (num_left-- == 0) throw std::runtime_error("no more");
      });
      EXPECT_THROW(submit_all(queue, bytes, {5 * kPiece, 5 * kPiece}), std::runtime_error);
    }
    EXPECT_EQ(sink.content.size(), (n < 4 ? n + 1 : n + 2) * kPiece);
    EXPECT_TRUE(std::equal(sink.content.begin(), sink.content.end(), bytes.begin()));
    EXPECT_EQ(sink.num_finished, 0);
  }
}

// In the background the error comes with a later call; the sink is left alone after it.
TEST(BlockQueueTest, WhatASinkThrowsReachesTheCallerAndEndsTheFile) {
  const std::vector<std::size_t> sizes = {5 * kPiece, kPiece + 1, 3 * kPiece, 10, 20, 30};
  const Bytes bytes = made_bytes(sum(sizes));
  for (const bool in_background : {false, true}) {
    for (int n = 0; n < 6; ++n) {
      SCOPED_TRACE(n);
      TellingSink sink;
      int num_calls = 0;
      sink.before = [&] {
        if (num_calls++ == n) throw Error(ErrorCode::kCheckpoint, "the disk is full");
      };
      {
        BlockQueue queue(sink, in_background);
        if (!in_background) queue.set_pause([] {});
        EXPECT_THROW(
            {
              submit_all(queue, bytes, sizes);
              (void)queue.drain();
            },
            Error);
        if (in_background) {  // each call says so
          EXPECT_THROW((void)queue.acquire(1, 0), Error);
          EXPECT_THROW((void)queue.drain(), Error);
        }
      }
      EXPECT_EQ(num_calls, n + 1);
      EXPECT_EQ(sink.num_finished, 0);
      EXPECT_LT(sink.content.size(), bytes.size());
      EXPECT_TRUE(std::equal(sink.content.begin(), sink.content.end(), bytes.begin()));
    }
  }
}

/// What is written of two blocks if the queue goes while the sink has the first of them.
Bytes written_of_two(const Bytes& bytes) {
  std::atomic<bool> is_open{false};
  TellingSink sink;
  sink.before = [&] {
    while (!is_open.load()) std::this_thread::yield();
  };
  std::thread opener;
  {
    BlockQueue queue(sink, true);
    submit_all(queue, bytes, {10, 10});
    opener = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      is_open.store(true);
    });
  }
  opener.join();
  EXPECT_EQ(sink.num_finished, 0);
  return sink.content;
}

// A busy machine may let the sink go on before the queue is told to stop, so once is enough.
TEST(BlockQueueTest, WhatIsNotYetWrittenIsDroppedWithTheQueue) {
  const Bytes bytes = made_bytes(20);
  std::size_t least = bytes.size();
  for (int i = 0; i < 20 && least == bytes.size(); ++i) {
    const Bytes written = written_of_two(bytes);
    EXPECT_TRUE(std::equal(written.begin(), written.end(), bytes.begin()));
    least = std::min(least, written.size());
  }
  EXPECT_LE(least, 10U);
}

TEST(BlockQueueTest, AcquiringWaitsWhileTwoBlocksAreOut) {
  std::atomic<bool> is_open{false};
  std::atomic<bool> is_acquired{false};
  TellingSink sink;
  sink.before = [&] {
    while (!is_open.load()) std::this_thread::yield();
  };
  const Bytes bytes = made_bytes(30);
  BlockQueue queue(sink, true);
  std::thread submitter([&] {
    submit_all(queue, bytes, {10, 10});
    auto third = queue.acquire(10, 20);
    is_acquired.store(true);
    std::copy_n(bytes.data() + 20, 10, third->data());
    queue.submit(std::move(third), 10);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(is_acquired.load());
  is_open.store(true);
  submitter.join();
  EXPECT_EQ(queue.drain(), checksum_of(bytes));
  EXPECT_TRUE(sink.content == bytes);
}

std::atomic<int> num_signals{0};

// A write that a signal interrupts takes part of a piece only; the reader sends one before each of
// its reads.
class InterruptingReader {
 public:
  InterruptingReader() {
    EXPECT_EQ(pipe(ends_.data()), 0);
    struct sigaction nothing{};
    nothing.sa_handler = [](int) { ++num_signals; };
    sigaction(SIGUSR1, &nothing, &before_);
    thread_ = std::thread([this, writer = pthread_self()] { read_all(writer); });
  }
  InterruptingReader(const InterruptingReader&) = delete;
  InterruptingReader& operator=(const InterruptingReader&) = delete;
  ~InterruptingReader() {
    join();
    sigaction(SIGUSR1, &before_, nullptr);
    close(ends_[0]);
  }

  int writer_end() const { return ends_[1]; }
  /// All that was written.
  const Bytes& join() {
    if (thread_.joinable()) {
      close(ends_[1]);
      thread_.join();
    }
    return content_;
  }

 private:
  void read_all(pthread_t writer) {
    std::array<std::byte, 10'000> part;
    for (ssize_t n = 1; n > 0;) {
      pthread_kill(writer, SIGUSR1);
      n = read(ends_[0], part.data(), part.size());
      content_.insert(content_.end(), part.begin(), part.begin() + std::max<ssize_t>(n, 0));
    }
  }

  std::array<int, 2> ends_{};
  struct sigaction before_{};
  Bytes content_;
  std::thread thread_;
};

TEST(BlockQueueTest, ShortWritesOfTheSystemLoseNothing) {
  const Bytes bytes = made_bytes(sum(kSizes));
  InterruptingReader reader;
  FileSink sink(reader.writer_end(), "pipe");
  BlockQueue queue(sink, false);
  int num_pauses = 0;
  queue.set_pause([&] { ++num_pauses; });
  submit_all(queue, bytes, kSizes);
  EXPECT_EQ(queue.drain(), checksum_of(bytes));
  EXPECT_TRUE(reader.join() == bytes);
  EXPECT_GT(num_pauses, 0);
  EXPECT_GT(num_signals.load(), 0);
}

}  // namespace
}  // namespace recsdk::test::block_queue_test
