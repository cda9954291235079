// A lock for many readers or one writer. Readers do not starve writers, and the lock knows which
// callbacks run under it.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace recsdk::internal {

/// The standard library's shared lock prefers readers on Linux: a stream of lookups could hold up
/// an insertion for seconds. Here everybody passes a gate, and a writer keeps it while it waits for
/// readers to leave.
class FairMutex {
 public:
  /// Marks, on this thread, that a callback runs under the lock.
  class CallbackScope {
   public:
    explicit CallbackScope(const FairMutex& mutex) : mutex_(&mutex), outer_(innermost) {
      innermost = this;
    }
    CallbackScope(const CallbackScope&) = delete;
    CallbackScope& operator=(const CallbackScope&) = delete;
    ~CallbackScope() { innermost = outer_; }

   private:
    friend class FairMutex;
    static thread_local const CallbackScope* innermost;
    const FairMutex* mutex_;
    const CallbackScope* outer_;
  };

  /// Work under the lock that nobody waits for.
  class Deferred {
   public:
    Deferred() = default;
    Deferred(const Deferred&) = delete;
    Deferred& operator=(const Deferred&) = delete;
    virtual ~Deferred() = default;
    virtual void run() noexcept = 0;

   private:
    friend class FairMutex;
    Deferred* next_ = nullptr;
  };

  /// True on a thread that is in a callback under this lock, so that it holds it already.
  bool is_in_callback() const noexcept;

  /// Throw Error(kBusy) in a callback under this lock, where they would wait for ever.
  void lock();
  void lock_shared();
  /// Takes the lock if it is free and nobody waits for it.
  bool try_lock();
  /// Has `work`, which lives as long, run before whatever takes the lock next, in the order of
  /// these calls. A call that takes it after this has returned finds the work done.
  void defer(Deferred& work) noexcept;
  /// Whether a thread waits for the lock; to be asked while it is locked. May change at once.
  bool is_awaited() noexcept;
  void unlock() { mutex_.unlock(); }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  void refuse_callback() const;
  void run_deferred() noexcept;

  std::mutex gate_;
  std::shared_mutex mutex_;
  std::atomic<Deferred*> deferred_{nullptr};  // the last one first
};

}  // namespace recsdk::internal
