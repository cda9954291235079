#include "arguments/busy.h"

#include <atomic>
#include <cstdint>
#include <utility>

#include "arguments/gil.h"

namespace recsdk::bind {
namespace {

std::atomic<std::uint64_t> num_ended{0};

// Never destroyed: the interpreter may end first.
nb::object& function() {
  static auto* const held = new nb::object();
  return *held;
}

}  // namespace

void set_drop_abandoned(nb::object given) { function() = std::move(given); }

void note_ended() noexcept { num_ended.fetch_add(1, std::memory_order_relaxed); }

bool drop_abandoned() {
  const WithGil gil;
  if (!function().is_valid()) return false;
  const std::uint64_t before = num_ended.load(std::memory_order_relaxed);
  call_python(function());
  return num_ended.load(std::memory_order_relaxed) != before;
}

}  // namespace recsdk::bind
