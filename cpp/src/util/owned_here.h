// Ownership of objects with threads of their own, in a process that may fork.
#pragma once

#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace recsdk::internal {

/// Never destroys an object, but keeps a pointer to it, so that it is no leak.
void leave_behind(const void* object) noexcept;

/// Owns an object with threads of its own, or nothing. A child of fork has none of these threads,
/// and finds the object in any state. So the child leaves it behind: destroying it would wait for
/// the threads.
template <typename T>
class OwnedHere {
 public:
  OwnedHere() noexcept = default;
  template <typename... Arguments>
  explicit OwnedHere(std::in_place_t, Arguments&&... arguments)
      : object_(new T(std::forward<Arguments>(arguments)...)), process_(getpid()) {}
  OwnedHere(OwnedHere&& other) noexcept
      : object_(std::exchange(other.object_, nullptr)), process_(other.process_) {}
  OwnedHere& operator=(OwnedHere&& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(process_, other.process_);
    return *this;
  }
  OwnedHere(const OwnedHere&) = delete;
  OwnedHere& operator=(const OwnedHere&) = delete;
  ~OwnedHere() { reset(); }

  explicit operator bool() const noexcept { return object_ != nullptr; }
  /// True in the process that has the object's threads.
  bool is_here() const noexcept { return process_ == getpid(); }

  /// There must be an object. Throws std::invalid_argument in a child of fork.
  T* operator->() const {
    if (is_here()) return object_;
    throw std::invalid_argument(
        "a file that was being read or written at a fork cannot be used in the child; "
        "open it again");
  }

  void reset() noexcept {
    if (object_ == nullptr) return;
    T* const object = std::exchange(object_, nullptr);
    is_here() ? delete object : leave_behind(object);
  }

 private:
  T* object_ = nullptr;
  pid_t process_ = 0;
};

}  // namespace recsdk::internal
