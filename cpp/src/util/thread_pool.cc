#include "util/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "recsdk/runtime.h"
#include "util/must.h"
#include "util/owned_here.h"

namespace recsdk {
namespace internal {
namespace {

// How long a waiting thread spins before it sleeps: about as long as waking a sleeping thread
// takes. The phases of one call follow each other faster than that.
constexpr std::chrono::microseconds kSpin{50};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Waits until `is_done` or for kSpin.
template <typename F>
void spin_until(F is_done) {
  constexpr int kLooksATime = 16;  // the clock is dearer than a look
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooksATime; ++i) {
      if (is_done()) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
}

// One parallel_for. It lives on its caller's stack: the caller leaves only when no helper is
// inside.
struct Job {
  RangeBody body;
  std::int64_t count;
  std::int64_t grain;
  int helpers_wanted;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> helpers_inside{0};  // changed under the pool's mutex
  std::condition_variable left;        // a helper went
  std::exception_ptr error;            // under the pool's mutex
};

int threads_of_machine() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads)
      : num_threads_(num_threads), spins_(num_threads <= threads_of_machine()) {
    try {
      threads_.reserve(static_cast<std::size_t>(num_threads - 1));
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {
      // The system gives no more threads: go on with those there are.
    }
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() { stop(); }

  int num_threads() const { return num_threads_; }

  void run(Job& job) {
    int num_wakes = job.helpers_wanted;  // helpers count it down as soon as they see the job
    try {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
      num_posted_.fetch_add(1, std::memory_order_relaxed);
    } catch (const std::bad_alloc&) {
      num_wakes = 0;  // nobody will hear of the job, so its owner does it alone
    }
    for (int i = 0; i < num_wakes; ++i) wake_.notify_one();
    work(job);
    std::unique_lock lock(mutex_);
    std::erase(jobs_, &job);
    if (spins_ && job.helpers_inside.load() != 0) {
      lock.unlock();
      spin_until([&] { return job.helpers_inside.load(std::memory_order_relaxed) == 0; });
      lock.lock();  // the last helper has then let go of the job
    }
    job.left.wait(lock, [&] { return job.helpers_inside.load() == 0; });
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Takes pieces until none is left.
  void work(Job& job) {
    try {
      for (;;) {
        const std::int64_t begin = job.next.fetch_add(job.grain);
        if (begin >= job.count) return;
        job.body(begin, std::min(begin + job.grain, job.count));
      }
    } catch (...) {
      job.next.store(job.count);
      const std::lock_guard lock(mutex_);
      if (!job.error) job.error = std::current_exception();
    }
  }

  Job* find_job() {
    for (Job* job : jobs_) {
      if (job->helpers_wanted > 0 && job->next.load() < job->count) return job;
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return stopping_ || (job = find_job()) != nullptr; });
      if (job == nullptr) return;
      --job->helpers_wanted;
      ++job->helpers_inside;
      lock.unlock();
      work(*job);
      lock.lock();
      --job->helpers_inside;
      // Under the lock: once its owner sees zero and has the lock, the job is gone.
      job->left.notify_all();
      if (spins_ && find_job() == nullptr) {
        const std::uint64_t seen = num_posted_.load(std::memory_order_relaxed);
        lock.unlock();
        spin_until([&] { return num_posted_.load(std::memory_order_relaxed) != seen; });
        lock.lock();
      }
    }
  }

  const int num_threads_;
  const bool spins_;  // not where threads share processors: one that looks would hold up another
  std::atomic<std::uint64_t> num_posted_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job*> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

int threads_of_environment() {
  const char* text = std::getenv("RECSDK_NUM_THREADS");
  if (text == nullptr || *text == '\0') return threads_of_machine();
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1 || value > 1024) {
    throw std::invalid_argument(must("RECSDK_NUM_THREADS", "be a whole number of 1 to 1024",
                                     "'" + std::string(text) + "'"));
  }
  return static_cast<int>(value);
}

// The pool and its lock. Never destroyed, so that threads may still use it while the process ends.
struct Runtime {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  int num_threads = 0;  // of the pool to be made; 0: not decided yet
};

Runtime& runtime();

// Only the forking thread lives on in the child: the child leaves the pool behind and makes a new
// one when needed.
void prepare_fork() { runtime().mutex.lock(); }
void parent_after_fork() { runtime().mutex.unlock(); }
void child_after_fork() {
  Runtime& r = runtime();
  if (r.pool != nullptr) leave_behind(new std::shared_ptr(std::move(r.pool)));
  r.mutex.unlock();
}

Runtime& runtime() {
  static Runtime* const instance = [] {
    auto* made = new Runtime;
    pthread_atfork(prepare_fork, parent_after_fork, child_after_fork);
    return made;
  }();
  return *instance;
}

}  // namespace

void prepare_pool_for_fork() { runtime(); }

namespace {

int decided_num_threads(Runtime& r) {
  if (r.num_threads == 0) r.num_threads = threads_of_environment();
  return r.num_threads;
}

// Null if there is no memory for one.
std::shared_ptr<ThreadPool> current_pool() {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  try {
    if (r.pool == nullptr) r.pool = std::make_shared<ThreadPool>(decided_num_threads(r));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  return r.pool;
}

void run_alone(std::int64_t count, std::int64_t grain, RangeBody body) {
  for (std::int64_t begin = 0; begin < count; begin += grain)
    body(begin, std::min(begin + grain, count));
}

}  // namespace

void parallel_for(std::int64_t count, std::int64_t grain, int max_threads, RangeBody body) {
  if (count <= 0) return;
  const std::int64_t pieces = (count + grain - 1) / grain;
  if (pieces == 1 || max_threads == 1) return run_alone(count, grain, body);
  const std::shared_ptr<ThreadPool> pool = current_pool();
  if (pool == nullptr) return run_alone(count, grain, body);
  const std::int64_t threads =
      std::min({pieces, std::int64_t{max_threads}, std::int64_t{pool->num_threads()}});
  Job job{body, count, grain, static_cast<int>(threads) - 1, {}, {}, {}, {}};
  pool->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace internal

int num_threads() {
  internal::Runtime& r = internal::runtime();
  const std::lock_guard lock(r.mutex);
  return internal::decided_num_threads(r);
}

void set_num_threads(int count) {
  if (count < 1 || count > 1024) {
    throw std::invalid_argument(internal::must("num_threads", "be 1 to 1024", count));
  }
  internal::Runtime& r = internal::runtime();
  std::shared_ptr<internal::ThreadPool> old;
  {
    const std::lock_guard lock(r.mutex);
    r.num_threads = count;
    old = std::move(r.pool);
    r.pool = nullptr;
  }
  // The last call that uses the old pool ends it, this one or another.
}

}  // namespace recsdk
