#include "counts.h"

#include <ctime>

#include <atomic>
#include <mutex>

namespace npusim {
namespace {

std::atomic<bool> counts_now{false};
std::mutex mutex;
Counts counts;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

void start_counting(bool is_wanted) {
  const std::lock_guard lock(mutex);
  counts = {};
  counts_now = is_wanted;
}

Counts counted() {
  const std::lock_guard lock(mutex);
  return counts;
}

void count_operator(const std::string& name) {
  if (!counts_now) return;
  const std::lock_guard lock(mutex);
  ++counts.operators[name];
}

void count_waits(std::int64_t number) {
  if (!counts_now || number == 0) return;
  const std::lock_guard lock(mutex);
  counts.waits += number;
}

void count_copy(std::size_t bytes, bool to_device) {
  if (!counts_now) return;
  const std::lock_guard lock(mutex);
  (to_device ? counts.bytes_to_device : counts.bytes_to_host) += static_cast<std::int64_t>(bytes);
}

TimedWork::TimedWork() : begin_(counts_now ? thread_seconds() : 0) {}

TimedWork::~TimedWork() {
  if (begin_ == 0) return;
  const double seconds = thread_seconds() - begin_;
  const std::lock_guard lock(mutex);
  counts.seconds += seconds;
}

}  // namespace npusim
