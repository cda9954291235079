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
    // What is prepared for fork last is locked first. Who holds the gate waits for updates, and
    // those for the pool: so the pool's lock must not be taken by a fork that waits at the gate.
    prepare_pool_for_fork();
    // The child's thread has another number than the one that locked, so it cannot unlock: it
    // makes the gate anew, which nobody else there can hold.
    pthread_atfork([] { gate().lock(); }, [] { gate().unlock(); },
                   [] { std::construct_at(&gate()); });
    return made;
  }();
  return *instance;
}

// Made when the library is loaded: a fork beside the thread that first comes here would not wait
// for it, and leave the child with a gate half made.
[[maybe_unused]] const std::shared_mutex& made_early = gate();

}  // namespace

std::shared_lock<std::shared_mutex> hold_off_fork() { return std::shared_lock(gate()); }

}  // namespace recsdk::internal
