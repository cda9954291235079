#include "serving/readers.h"

#include <sys/mman.h>

#include <chrono>
#include <new>
#include <thread>

namespace recsdk::internal {
namespace {

/// Threads in turn get different stripes.
unsigned stripe_of_thread() {
  static std::atomic<unsigned> next{0};
  thread_local const unsigned mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

}  // namespace

Readers& Readers::of_process() {
  static Readers* const readers = new Readers;  // threads may read until the very end
  return *readers;
}

Readers::Readers() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, sizeof(Shared), MADV_WIPEONFORK);
  shared_ = new (memory) Shared{};
}

std::atomic<std::uint64_t>& Readers::enter() {
  Count& mine = shared_->counts[set_.load()][stripe_of_thread() % kStripes];
  mine.calls.fetch_add(1);
  return mine.calls;
}

void Readers::wait_until_empty(unsigned set) const {
  for (const Count& count : shared_->counts[set]) {
    while (count.calls.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Readers::wait() {
  const std::lock_guard<std::mutex> lock(shared_->waiting);
  const unsigned before = set_.load();
  wait_until_empty(1 - before);
  set_.store(1 - before);
  wait_until_empty(before);
}

}  // namespace recsdk::internal
