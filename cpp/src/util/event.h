// Something that happens again and again, which threads wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace recsdk::internal {

/// Who waits holds no lock. So a thread may fork while others wait: a child of fork finds an event
/// that nobody waits for, where a condition variable would wait for who is not there.
class Event {
 public:
  /// How often it has happened.
  std::uint32_t count() const noexcept { return count_.load(); }

  /// It happens: wakes all that wait.
  void happen() noexcept;

  /// Waits until it has happened since `count()` gave `seen`, or a while; or less, for no reason.
  void wait_since(std::uint32_t seen, std::chrono::nanoseconds at_most) const noexcept;

 private:
  std::atomic<std::uint32_t> count_{0};
  mutable std::atomic<std::uint32_t> num_waiting_{0};  // in a child of fork, more than there are
};

}  // namespace recsdk::internal
