// How much a run tests: RECSDK_TEST_PROFILE is "full", or else samples will do.
#pragma once

#include <cstdlib>
#include <string_view>

namespace recsdk::test {

inline bool is_full_profile() {
  const char* const profile = std::getenv("RECSDK_TEST_PROFILE");
  return profile != nullptr && std::string_view(profile) == "full";
}

}  // namespace recsdk::test
