#include "util/event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace recsdk::internal {
namespace {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

}  // namespace

void Event::happen() noexcept {
  count_.fetch_add(1);
  if (num_waiting_.load() == 0) return;
  syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Event::wait_since(std::uint32_t seen, std::chrono::nanoseconds at_most) const noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  const timespec while_of{static_cast<std::time_t>(seconds.count()),
                          static_cast<long>((at_most - seconds).count())};
  num_waiting_.fetch_add(1);
  syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, &while_of, nullptr, 0);
  num_waiting_.fetch_sub(1);
}

}  // namespace recsdk::internal
