#include "util/fair_mutex.h"

#include "recsdk/error.h"

namespace recsdk::internal {

thread_local const FairMutex::CallbackScope* FairMutex::CallbackScope::innermost = nullptr;

bool FairMutex::is_in_callback() const noexcept {
  for (const CallbackScope* scope = CallbackScope::innermost; scope != nullptr;
       scope = scope->outer_) {
    if (scope->mutex_ == this) return true;
  }
  return false;
}

void FairMutex::refuse_callback() const {
  if (!is_in_callback()) return;
  throw Error(ErrorCode::kBusy,
              "a callback of a table or index, such as what makes its rows or says who is to "
              "leave, has called that table or index; have it go by its arguments alone");
}

void FairMutex::lock() {
  refuse_callback();
  const std::lock_guard pass(gate_);
  mutex_.lock();
  run_deferred();
}

bool FairMutex::try_lock() {
  if (is_in_callback()) return false;
  const std::unique_lock pass(gate_, std::try_to_lock);
  if (!pass || !mutex_.try_lock()) return false;
  run_deferred();
  return true;
}

void FairMutex::lock_shared() {
  refuse_callback();
  const std::lock_guard pass(gate_);
  if (deferred_.load() != nullptr) {
    const std::lock_guard alone(mutex_);
    run_deferred();
  }
  mutex_.lock_shared();
}

void FairMutex::defer(Deferred& work) noexcept {
  Deferred* before = deferred_.load();
  do {
    work.next_ = before;
  } while (!deferred_.compare_exchange_weak(before, &work));
}

void FairMutex::run_deferred() noexcept {
  if (deferred_.load() == nullptr) return;
  Deferred* first = nullptr;
  for (Deferred* last = deferred_.exchange(nullptr); last != nullptr;) {
    Deferred* const before = last->next_;
    last->next_ = first;
    first = last;
    last = before;
  }
  while (first != nullptr) {
    Deferred* const next = first->next_;  // the work may end with its object
    first->run();
    first = next;
  }
}

bool FairMutex::is_awaited() noexcept {
  const std::unique_lock pass(gate_, std::try_to_lock);
  return !pass.owns_lock();
}

}  // namespace recsdk::internal
