#include "checkpoint/index_queue.h"

#include <utility>

namespace recsdk::internal {
namespace {

constexpr std::size_t kMostKeys = std::size_t{3} << 19;  // 12 MiB of them

}  // namespace

IndexQueue::IndexQueue(std::function<void(const NewKeys&)> insert)
    : insert_(std::move(insert)), thread_([this] { serve(); }) {}

IndexQueue::~IndexQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void IndexQueue::rethrow() {
  if (error_) std::rethrow_exception(error_);
}

void IndexQueue::push(NewKeys keys) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_keys_ < kMostKeys || error_; });
  rethrow();
  const std::size_t count = keys.keys.size();
  waiting_.push_back(std::move(keys));
  num_keys_ += count;
  changed_.notify_all();
}

void IndexQueue::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_keys_ == 0 || error_; });
  rethrow();
}

void IndexQueue::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const NewKeys keys = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      insert_(keys);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    num_keys_ -= keys.keys.size();
    error_ = error;
    changed_.notify_all();
    if (error_) return;
  }
}

}  // namespace recsdk::internal
