#include "util/owned_here.h"

#include <atomic>
#include <new>

namespace recsdk::internal {
namespace {

struct LeftBehind {
  const void* object;
  LeftBehind* next;
};

std::atomic<LeftBehind*> g_left_behind{nullptr};

}  // namespace

void leave_behind(const void* object) noexcept {
  auto* const left = new (std::nothrow) LeftBehind{object, g_left_behind.load()};
  if (left == nullptr) return;
  while (!g_left_behind.compare_exchange_weak(left->next, left)) {
  }
}

}  // namespace recsdk::internal
