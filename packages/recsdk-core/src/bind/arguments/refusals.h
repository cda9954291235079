// "NAME must WHAT, got VALUE" as ValueError, for what the engine does not see. The engine's own
// texts, in its util/must.h, are not among its public headers, which are all that is used here.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>

namespace recsdk::bind {

[[noreturn, gnu::cold]] inline void refuse_value(const std::string& name, const std::string& what,
                                                 const std::string& got) {
  throw nanobind::value_error((name + " must " + what + ", got " + got).c_str());
}

template <typename Number>
[[noreturn, gnu::cold]] void refuse_value(const std::string& name, const std::string& what,
                                          Number got) {
  refuse_value(name, what, std::to_string(got));
}

/// Of numbers that should be 0 or more and add up.
[[noreturn, gnu::cold]] inline void refuse_sum(const std::string& name, const std::string& of_what,
                                               std::size_t wanted,
                                               std::span<const std::int64_t> numbers) {
  // Not as whole numbers, whose sum may overflow.
  const double sum = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  const auto total = static_cast<std::int64_t>(std::clamp(sum, -9e18, 9e18));
  const std::int64_t least = numbers.empty() ? 0 : std::ranges::min(numbers);
  refuse_value(name, "be 0 or more and add up to the " + of_what + ", " + std::to_string(wanted),
               std::to_string(total) + " in all and " + std::to_string(least) + " as the least");
}

/// Of arrays and lists that should have one element for each of something.
inline void require_size(const char* name, const char* of_what, std::size_t wanted,
                         std::size_t got) {
  if (got != wanted)
    refuse_value(
        name, std::string("have one element for each ") + of_what + ", " + std::to_string(wanted),
        got);
}

/// Of stretches that should lie within something of this size.
inline void require_within(const char* name, const char* of_what, std::int64_t size,
                           std::int64_t begin, std::int64_t count) {
  if (begin < 0 || count < 0 || begin > size || count > size - begin)
    refuse_value(name, std::string("lie within ") + of_what + ", 0 to " + std::to_string(size),
                 std::to_string(count) + " from " + std::to_string(begin) + " on");
}

/// Of numbers that say which of some things is meant.
inline void require_number_of(const char* name, const char* of_what, std::size_t size,
                              std::int64_t got) {
  if (got < 0 || static_cast<std::size_t>(got) >= size)
    refuse_value(name,
                 std::string("be 0 or more and below the number of ") + of_what + ", " +
                     std::to_string(size),
                 got);
}

/// Of the offsets of bags: at least one, so that (0,) means no bags.
inline void require_some_offsets(std::span<const std::int64_t> offsets) {
  if (offsets.empty())
    throw nanobind::value_error(
        "offsets must have shape (B + 1,), got an empty array; for no bags pass [0]");
}

/// Of numbers of which one is below the one before it.
[[noreturn, gnu::cold]] inline void refuse_descent(const std::string& name,
                                                   std::span<const std::int64_t> numbers) {
  const auto above = std::ranges::adjacent_find(numbers, std::greater<>());
  refuse_value(name, "not descend",
               std::to_string(above[1]) + " after " + std::to_string(above[0]) + " at " +
                   std::to_string(above - numbers.begin() + 1) + "; pass them in ascending order");
}

}  // namespace recsdk::bind
