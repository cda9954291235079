#include "keymap/shared_arena.h"

#include <algorithm>
#include <utility>

namespace recsdk::internal {

SharedArena::~SharedArena() {
  for (Extent& extent : extents_) give_back(extent);
}

SharedArena::Extent& SharedArena::mine() {
  const std::thread::id here = std::this_thread::get_id();
  const auto found = std::find_if(extents_.begin(), extents_.end(),
                                  [here](const Extent& e) { return e.owner == here; });
  return found != extents_.end() ? *found : extents_.emplace_back(Extent{here});
}

void SharedArena::give_back(Extent& extent) noexcept {
  if (extent.units > 0) arena_.free(extent.begin, std::exchange(extent.units, 0));
}

std::byte* SharedArena::allocate(std::uint32_t& units, std::uint32_t less) {
  const std::lock_guard lock(mutex_);
  if (std::byte* const block = arena_.allocate_used(units, less)) return block;
  Extent& extent = mine();
  if (extent.units < units) {
    std::uint32_t taken = units;
    std::byte* const fresh = arena_.take_fresh(taken);
    give_back(extent);
    extent.begin = fresh;
    extent.units = taken;
  }
  extent.units -= units;
  return std::exchange(extent.begin, extent.begin + units * Arena::kUnit);
}

void SharedArena::free(std::byte* block, std::uint32_t units) noexcept {
  const std::lock_guard lock(mutex_);
  arena_.free(block, units);
}

}  // namespace recsdk::internal
