// Numbers in messages.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace recsdk::internal {

/// Nine digits, which tell floats apart: "0.1", "1e-08", "nan"; 17 where they are of another number
/// that is no float, as of what lies just above 1.
inline std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  const bool is_float = !(std::fabs(value) <= static_cast<double>(FLT_MAX)) ||
                        static_cast<double>(static_cast<float>(value)) == value;
  if (!is_float && std::strtod(text, nullptr) != value)
    std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

inline std::string number_text(float value) { return number_text(static_cast<double>(value)); }

}  // namespace recsdk::internal
