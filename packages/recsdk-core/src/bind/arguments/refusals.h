// "NAME must WHAT, got VALUE" as ValueError, for what the engine does not see. All are cold.
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

/// Of arrays that should have one number for each of something.
[[noreturn, gnu::cold]] inline void refuse_size(const std::string& name, const std::string& of_what,
                                                std::size_t wanted, std::size_t got) {
  refuse_value(name, "have one number for each " + of_what + ", " + std::to_string(wanted), got);
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
