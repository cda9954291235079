// Configs that are refused, and what is said of each.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace recsdk::test {

template <typename Config>
struct BadConfig {
  Config config;
  std::string message;
};

template <typename Config>
void expect_refused(const std::vector<BadConfig<Config>>& bad) {
  for (const BadConfig<Config>& example : bad) {
    try {
      example.config.validate();
      ADD_FAILURE() << "accepted: " << example.message;
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()), example.message);
    }
  }
}

}  // namespace recsdk::test
