// The parts of XXH3 that go through many bytes, compiled once per instruction set from xxh3.inc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace recsdk::internal {

/// States are those of xxHash's header, which all instruction sets share.
struct Xxh3 {
  void (*update64)(void* state, const void* data, std::size_t size);
  void (*update128)(void* state, const void* data, std::size_t size);
  std::uint64_t (*hash64)(const void* data, std::size_t size);
};

extern const Xxh3 kXxh3Baseline;
extern const Xxh3 kXxh3Avx2;

}  // namespace recsdk::internal
