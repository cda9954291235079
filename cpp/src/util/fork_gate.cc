#include "util/fork_gate.h"

#include <pthread.h>

#include <memory>

#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

// Never destroyed, so that threads may still pass while the process ends.
std::shared_mutex& gate() {
  static std::shared_mutex* const instance = [] {
    auto* made = new std::shared_mutex;
    // Fork locks first what was prepared for it last. A holder of the gate waits for updates, and
    // updates wait for the pool: so a fork that waits at the gate must not hold the pool's lock.
    prepare_pool_for_fork();
    // The child's thread has another number than the one that locked, so it cannot unlock the gate.
    // It makes the gate anew; nobody else in the child can hold it.
    pthread_atfork([] { gate().lock(); }, [] { gate().unlock(); },
                   [] { std::construct_at(&gate()); });
    return made;
  }();
  return *instance;
}

// Made when the library is loaded. Otherwise a fork beside the thread that makes it would not wait,
// and the child would have a half-made gate.
[[maybe_unused]] const std::shared_mutex& made_early = gate();

}  // namespace

std::shared_lock<std::shared_mutex> hold_off_fork() { return std::shared_lock(gate()); }

}  // namespace recsdk::internal
