// Which rules of eviction a table takes, at the bounds of each number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/table.h"

namespace recsdk::eviction_rule_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// What is said of a rule; empty if it is taken.
std::string refusal(const EvictConfig& rule, std::optional<std::int64_t> max_rows = 100) {
  try {
    TableConfig config;
    config.dim = 1;
    config.name = "items";
    config.max_rows = max_rows;
    config.eviction = rule;
    const Table made(config);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

/// A number of a rule, in a rule that has it, and where its bounds are.
template <typename Number>
struct Bounds {
  const char* name;
  std::function<EvictConfig(Number)> with;
  std::vector<Number> taken;
  std::vector<Number> refused;
};

template <typename Number>
void expect_bounds(const std::vector<Bounds<Number>>& all) {
  for (const Bounds<Number>& each : all) {
    for (const Number number : each.taken)
      EXPECT_EQ(refusal(each.with(number)), "") << each.name << " " << number;
    for (const Number number : each.refused) {
      const std::string said = refusal(each.with(number));
      EXPECT_NE(said.find("'items': eviction." + std::string(each.name) + " must be "),
                std::string::npos)
          << each.name << " " << number << ": " << said;
    }
  }
}

TEST(EvictionRule, RealNumbersHaveBounds) {
  using E = EvictConfig;
  constexpr auto kLfu = EvictOrder::kLfu;
  constexpr auto kShows = EvictOrder::kShowClick;
  const double least = std::numeric_limits<double>::min();
  const double tiny = std::ldexp(1.0, -16);
  const double large = std::ldexp(1.0, 20);
  const std::vector<double> weights = {0.0, tiny, 0.3, large};
  const std::vector<double> no_weights = {-1.0, std::nextafter(tiny, 0.0),
                                          std::nextafter(large, kInfinity), kInfinity, kNan};
  const std::vector<double> parts = {least, 0.5, 1.0};
  const std::vector<double> no_parts = {0.0, -0.5, std::nextafter(1.0, 2.0), kNan, kInfinity};
  const std::vector<double> above_0 = {least, 1.0, std::numeric_limits<double>::max()};
  const std::vector<double> not_above_0 = {0.0, -1.0, kInfinity, kNan};
  expect_bounds<double>({
      {"half_life", [](double x) { return E{.order = kLfu, .half_life = x}; }, above_0,
       not_above_0},
      {"below", [](double x) { return E{.order = EvictOrder::kLowNorm, .below = x}; }, above_0,
       not_above_0},
      {"alpha", [](double x) { return E{.order = kShows, .alpha = x, .beta = 1.0}; }, weights,
       no_weights},
      {"beta", [](double x) { return E{.order = kShows, .beta = x}; }, weights, no_weights},
      {"decay", [](double x) { return E{.order = kShows, .decay = x}; }, parts, no_parts},
      {"share", [](double x) { return E{.share = x}; }, parts, no_parts},
  });
}

TEST(EvictionRule, WholeNumbersHaveBounds) {
  using E = EvictConfig;
  using N = std::int64_t;
  const N most_rare = N{1} << 36;
  expect_bounds<N>({
      {"min_age", [](N n) { return E{.min_age = n}; }, {0, 1, kMost}, {-1, -kMost - 1}},
      {"ttl", [](N n) { return E{.ttl = n}; }, {1, kMost}, {0, -1}},
      {"rare_ttl",
       [](N n) { return E{.ttl = 5, .rare_ttl = n, .rare_count = 2}; },
       {1, 4},
       {0, -1, 5, 6}},
      {"rare_count",
       [](N n) { return E{.rare_ttl = 1, .rare_count = n}; },
       {2, most_rare},
       {1, 0, -1, most_rare + 1}},
      {"expire_every", [](N n) { return E{.ttl = 1, .expire_every = n}; }, {1, kMost}, {0, -1}},
      {"churn_steps", [](N n) { return E{.churn_steps = n}; }, {1, kMost}, {0, -1}},
      {"churn_records",
       [](N n) { return E{.churn_steps = 1, .churn_records = n}; },
       {1, 1000},
       {0, -1, kMost}},
      {"order", [](N n) { return E{.order = static_cast<EvictOrder>(n)}; }, {0}, {99}},
      {"clock", [](N n) { return E{.clock = static_cast<EvictClock>(n)}; }, {0, 1}, {2}},
  });
}

TEST(EvictionRule, WhatDoesNotGoTogetherIsRefused) {
  using E = EvictConfig;
  using O = EvictOrder;
  const EvictFunction function = [](const EvictColumns&, std::span<double>) {};
  const auto expect_refused = [](const EvictConfig& rule, const std::string& words) {
    const std::string said = refusal(rule);
    EXPECT_NE(said.find("'items': eviction." + words), std::string::npos) << words << ": " << said;
  };
  expect_refused({.half_life = 2.0}, "half_life is given");
  expect_refused({.below = 2.0}, "below is given");
  for (const E& rule : {E{.alpha = 2.0}, E{.beta = 1.0}, E{.decay = 0.5}})
    expect_refused(rule, "alpha, beta or decay is given");
  for (const O order : {O::kShowClick, O::kShowClickTotals})
    expect_refused({.order = order, .alpha = 0.0}, "alpha or beta must be above 0");
  for (const O order : {O::kLfu, O::kScore, O::kShowClick, O::kShowClickTotals, O::kLowNorm})
    expect_refused({.order = order, .clock = EvictClock::kTime}, "clock is time");
  expect_refused({.order = O::kFunction}, "function belongs together with kFunction");
  expect_refused({.function = function}, "function belongs together with kFunction");
  for (const E& rule : {E{.keeps_counts = true}, E{.keeps_scores = true}, E{.ignores_now = true}})
    expect_refused(rule, "keeps_counts, keeps_scores or ignores_now is given");
  expect_refused({.ttl = 2, .rare_ttl = 1}, "rare_ttl and rare_count belong together");
  expect_refused({.ttl = 2, .rare_count = 2}, "rare_ttl and rare_count belong together");
  EXPECT_EQ(refusal({.order = O::kFunction,
                     .clock = EvictClock::kTime,
                     .function = function,
                     .keeps_counts = true,
                     .keeps_scores = true,
                     .ignores_now = true}),
            "");
}

TEST(EvictionRule, RowsHaveAnEndUnlessKeysExpire) {
  using E = EvictConfig;
  for (const E& rule : {E{.ttl = 1}, E{.rare_ttl = 1, .rare_count = 2}, E{.share = 0.5},
                        E{.order = EvictOrder::kLowNorm, .below = 1.0}})
    EXPECT_EQ(refusal(rule, std::nullopt), "");
  for (const E& rule : {E{}, E{.order = EvictOrder::kLfu, .half_life = 2.0}, E{.min_age = 5}})
    EXPECT_NE(refusal(rule, std::nullopt).find("max_rows"), std::string::npos);
}

}  // namespace
}  // namespace recsdk::eviction_rule_test
