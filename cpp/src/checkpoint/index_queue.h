// Keys on their way into an index. A thread of its own inserts them, since finding their places
// takes as long as copying their rows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "recsdk/types.h"

namespace recsdk::internal {

/// Keys that get rows one after the other.
struct NewKeys {
  std::vector<Key> keys;
  RowNumber first_row = 0;
  std::int64_t expected = 0;  // about how many rows there will be, to size the index; 0: unknown
  std::string source;         // where they come from, for messages
};

/// For one thread.
class IndexQueue {
 public:
  /// `insert` is called by the queue's thread only. Throws std::system_error, std::bad_alloc.
  explicit IndexQueue(std::function<void(const NewKeys&)> insert);
  IndexQueue(const IndexQueue&) = delete;
  IndexQueue& operator=(const IndexQueue&) = delete;
  /// Drops keys whose insertion has not begun.
  ~IndexQueue();

  /// Waits while there are many keys already. Throws what insert has thrown.
  void push(NewKeys keys);
  /// Waits until all are inserted. Throws what insert has thrown.
  void drain();

 private:
  void serve();
  void rethrow();

  const std::function<void(const NewKeys&)> insert_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<NewKeys> waiting_;
  std::size_t num_keys_ = 0;  // waiting, and being inserted
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // begins when all else is there
};

}  // namespace recsdk::internal
