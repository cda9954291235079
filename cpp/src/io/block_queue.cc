#include "io/block_queue.h"

#include <cstdint>
#include <system_error>
#include <utility>

#include "io/direct_io.h"

namespace recsdk::internal {
namespace {

// One is written while the next waits, so that the sink never waits.
constexpr int kMostOut = 2;

}  // namespace

void BlockBuffer::resize(std::int64_t size, std::int64_t offset) {
  constexpr auto kPage = static_cast<std::int64_t>(kDirectAlignment);
  const auto needed = static_cast<std::size_t>(size + kPage);
  const bool wants_huge = offset >= kDirectFrom;
  if (memory_.size() < needed || (wants_huge && !is_huge_)) {
    memory_ = Pages(needed, wants_huge ? 0 : SIZE_MAX);
    is_huge_ = wants_huge;
    // Updates wait while rows are put there; they must not wait for the system as well.
    if (is_huge_) memory_.populate(0, needed);
  }
  data_ = memory_.data() + offset % kPage;
}

BlockQueue::BlockQueue(ByteSink& sink, bool in_background) : sink_(sink) {
  free_.reserve(2 * kMostOut);
  if (!in_background) return;
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error&) {
    // The system gives no thread: the caller writes.
  }
}

BlockQueue::~BlockQueue() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    items_.clear();
  }
  changed_.notify_all();
  thread_.join();
}

void BlockQueue::rethrow() {
  if (error_) std::rethrow_exception(error_);
}

std::unique_ptr<BlockBuffer> BlockQueue::acquire(std::int64_t size, std::int64_t offset) {
  std::unique_ptr<BlockBuffer> buffer;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_out_ < kMostOut || error_; });
    rethrow();
    if (!free_.empty()) {
      buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (buffer == nullptr) buffer = std::make_unique<BlockBuffer>();
  buffer->resize(size, offset);
  return buffer;
}

void BlockQueue::submit(std::unique_ptr<BlockBuffer> buffer, std::int64_t size) {
  Item item{std::move(buffer), static_cast<std::size_t>(size)};
  checksum_.add({item.buffer->data(), item.size});
  if (!thread_.joinable()) {
    write(item);
    return recycle(std::move(item.buffer));
  }
  {
    const std::lock_guard lock(mutex_);
    rethrow();
    items_.push_back(std::move(item));
    ++num_out_;
  }
  changed_.notify_all();
}

// The page cache takes fresh memory, for which the system may stop a processor for long. Writes
// past it only wait for the disk, and are faster in one piece.
void BlockQueue::write(const Item& item) {
  constexpr std::size_t kPiece = std::size_t{256} << 10;
  std::span<const std::byte> left(item.buffer->data(), item.size);
  while (pause_ && num_written_ < kDirectFrom && left.size() > kPiece) {
    sink_.write(left.first(kPiece));
    num_written_ += static_cast<std::int64_t>(kPiece);
    left = left.subspan(kPiece);
    pause_();
  }
  sink_.write(left);
  num_written_ += static_cast<std::int64_t>(left.size());
}

void BlockQueue::recycle(std::unique_ptr<BlockBuffer> buffer) {
  const std::lock_guard lock(mutex_);
  if (free_.size() < free_.capacity()) free_.push_back(std::move(buffer));
}

std::string BlockQueue::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_out_ == 0 || error_; });
  rethrow();
  sink_.finish();
  return checksum_.text();
}

void BlockQueue::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !items_.empty(); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      write(item);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --num_out_;
    if (error) error_ = error;
    if (free_.size() < free_.capacity()) free_.push_back(std::move(item.buffer));
    changed_.notify_all();
    if (error_) return;
  }
}

}  // namespace recsdk::internal
