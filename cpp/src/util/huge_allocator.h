// An allocator for much memory that is soon given back: small pages cost more than what is written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

#include "util/memory.h"
#include "util/unset_allocator.h"

namespace recsdk::internal {

/// As UnsetAllocator; from some huge pages on, asks the system for these.
template <typename T>
struct HugeAllocator : UnsetAllocator<T> {
  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (!is_huge(count)) return UnsetAllocator<T>::allocate(count);
    void* const memory = ::operator new(bytes, std::align_val_t(kHugePage));
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);  // if the kernel refuses, only speed is lost
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    if (is_huge(count)) {
      ::operator delete(memory, std::align_val_t(kHugePage));
    } else {
      UnsetAllocator<T>::deallocate(memory, count);
    }
  }

 private:
  static bool is_huge(std::size_t count) noexcept { return count >= 4 * kHugePage / sizeof(T); }
};

}  // namespace recsdk::internal
