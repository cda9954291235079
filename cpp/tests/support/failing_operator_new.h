// operator new that fails when asked to; for one source file of a test program.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#include "failing_allocations.h"

namespace {

void* allocate(std::size_t size, std::size_t alignment) {
  if (recsdk::test::allocation_fails()) throw std::bad_alloc();
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* const address = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (address == nullptr) throw std::bad_alloc();
  return address;
}

}  // namespace

// The other forms call these. Not inlined: the compiler would see free() of what operator new gave,
// and warn of it where it inlined only one of them.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return allocate(size, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
// What algorithms take for scratch memory; they do without it.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t& /*unused*/) noexcept {
  try {
    return allocate(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* address) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, std::size_t) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, std::align_val_t) noexcept {
  std::free(address);
}
[[gnu::noinline]] void operator delete(void* address, std::size_t, std::align_val_t) noexcept {
  std::free(address);
}
