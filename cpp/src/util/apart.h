// Whether arrays of a call lie apart.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

namespace recsdk::internal {

/// True if the two have no byte in common.
template <typename A, typename B>
bool are_apart(std::span<A> a, std::span<B> b) {
  if (a.empty() || b.empty()) return true;
  const auto bytes_a = std::as_bytes(a);
  const auto bytes_b = std::as_bytes(b);
  const std::less_equal<const std::byte*> ends_before;
  return ends_before(bytes_a.data() + bytes_a.size(), bytes_b.data()) ||
         ends_before(bytes_b.data() + bytes_b.size(), bytes_a.data());
}

}  // namespace recsdk::internal
