// Numbers in messages.
#pragma once

#include <cstdio>
#include <string>

namespace recsdk::internal {

/// As short as it can be without losing a float: "0.1", "1e-08", "nan".
inline std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

inline std::string number_text(float value) { return number_text(static_cast<double>(value)); }

}  // namespace recsdk::internal
