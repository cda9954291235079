// How messages say that an argument is wrong: "dim must be 1 to 1048576, got 0".
#pragma once

#include <cstddef>
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

}  // namespace recsdk::internal
