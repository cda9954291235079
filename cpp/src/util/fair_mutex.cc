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
}

void FairMutex::lock_shared() {
  refuse_callback();
  const std::lock_guard pass(gate_);
  mutex_.lock_shared();
}

bool FairMutex::is_awaited() noexcept {
  const std::unique_lock pass(gate_, std::try_to_lock);
  return !pass.owns_lock();
}

}  // namespace recsdk::internal
