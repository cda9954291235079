// Owning what has threads of its own, in a process that may fork.
#pragma once

#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace recsdk::internal {

/// Keeps an object in reach, so that it is no leak, and never destroys it.
void leave_behind(const void* object) noexcept;

/// Owns an object with threads of its own, or none. A child of fork has none of those threads, and
/// has the object as they happened to be changing it: there it is left behind, since to destroy it
/// would be to wait for them.
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
        "a file that was being read or written when this process was forked is of no use in it; "
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
