// Who reads what may be replaced: readers never wait, and what was replaced is freed when the last
// call that may read it has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace recsdk::internal {

/// Counts the calls under way, of the whole process.
///
/// A reader counts itself in one of two sets, then loads what it reads; both orders are
/// sequentially consistent. What is replaced first and waited for afterwards is seen by no reader
/// any more: `wait` sees each set empty once, and new readers enter the other one, so that it ends
/// however many come. Source: the toggle of P. Ramalhete and A. Correia, "Left-Right", 2015.
///
/// Counts lie in memory that a forked child finds zero: the threads that it lacks read nothing
/// there.
class Readers {
 public:
  /// That of this process. It is never destroyed.
  static Readers& of_process();

  /// A call under way. It costs two atomic additions to a line that few threads share.
  class Call {
   public:
    explicit Call(Readers& readers) : count_(readers.enter()) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() { count_.fetch_sub(1, std::memory_order_release); }

   private:
    std::atomic<std::uint64_t>& count_;
  };

  /// Returns when the calls that were under way have ended.
  void wait();

 private:
  static constexpr unsigned kStripes = 64;
  struct alignas(64) Count {
    std::atomic<std::uint64_t> calls;
  };
  struct Shared {
    Count counts[2][kStripes];
    std::mutex waiting;
  };

  Readers();
  std::atomic<std::uint64_t>& enter();
  void wait_until_empty(unsigned set) const;

  Shared* shared_;
  std::atomic<unsigned> set_{0};
};

}  // namespace recsdk::internal
