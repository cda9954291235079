// An allocator for memory that is about to be written.
#pragma once

#include <memory>
#include <new>

namespace recsdk::internal {

/// Leaves plain values that a vector adds unset: their pages come when threads write to them.
template <typename T>
struct UnsetAllocator : std::allocator<T> {
  void construct(T* place) noexcept { ::new (static_cast<void*>(place)) T; }
  void construct(T* place, T value) noexcept { *place = value; }
};

}  // namespace recsdk::internal
