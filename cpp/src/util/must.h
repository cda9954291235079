// How messages say that an argument is wrong: "dim must be 1 to 1048576, got 0".
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "util/number_text.h"

namespace recsdk::internal {

/// "NAME must WHAT, got VALUE". An enum shows its number, as it may have none of its names.
template <typename Value>
std::string must(std::string_view name, std::string_view what, const Value& got) {
  std::string message(name);
  message.append(" must ").append(what).append(", got ");
  if constexpr (std::is_same_v<Value, bool>)
    return message + (got ? "true" : "false");
  else if constexpr (std::is_enum_v<Value>)
    return message + std::to_string(static_cast<std::underlying_type_t<Value>>(got));
  else if constexpr (std::is_floating_point_v<Value>)
    return message + number_text(got);
  else if constexpr (std::is_integral_v<Value>)
    return message + std::to_string(got);
  else
    return message.append(std::string_view(got));
}

/// "NAME must have one element per key, 3, got 2", for arrays beside keys.
inline std::string must_fit_keys(std::string_view name, std::size_t num_keys, std::size_t got) {
  return must(name, "have one element per key, " + std::to_string(num_keys), got);
}

/// "1 part", "2 parts".
template <typename Count>
std::string counted(Count count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

/// "offsets must not descend, got 2 after 5 at 3; ...", for numbers of which one is below the one
/// before it.
inline std::string must_not_descend(std::string_view name, std::span<const std::int64_t> numbers) {
  const auto above = std::ranges::adjacent_find(numbers, std::greater<>());
  return must(name, "not descend",
              std::to_string(above[1]) + " after " + std::to_string(above[0]) + " at " +
                  std::to_string(above - numbers.begin() + 1)) +
         "; pass them in ascending order";
}

/// "lengths must be 0 or more and WHAT, got 9 in all and -1 as the least".
template <typename Number>
std::string must_add_up(std::string_view name, std::string_view what,
                        std::span<const Number> numbers) {
  // Not as whole numbers, whose sum may overflow.
  const double sum = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  const auto total = static_cast<std::int64_t>(std::clamp(sum, -9e18, 9e18));
  const Number least = numbers.empty() ? Number{0} : std::ranges::min(numbers);
  return must(name, "be 0 or more and " + std::string(what),
              std::to_string(total) + " in all and " + std::to_string(least) + " as the least");
}

}  // namespace recsdk::internal
