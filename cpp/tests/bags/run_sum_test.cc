// Runs of gradients are added in the order that the table of orders says, whatever lies beside
// them. The plan of recsdk_sharding is tested against the same table.
#include "bags/run_sum.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace recsdk::run_sum_test {
namespace {

using internal::plan_run_sum;
using internal::RunSum;
using internal::SortedGradients;
using internal::SumStep;

/// How a run of 1, 2, 3, ... items is added; its items are called 0, 1, 2, ...
std::vector<std::string> orders() {
  std::ifstream file(RECSDK_TESTS_FOLDER "/data/run_sums.txt");
  std::vector<std::string> found;
  for (std::string line; std::getline(file, line);) found.push_back(line);
  return found;
}

/// The sums that a plan makes of named gradients.
std::vector<std::string> summed(const RunSum& sum, const std::vector<std::string>& names) {
  std::vector<std::string> terms;
  for (const std::int64_t source : sum.order)
    terms.push_back(names[static_cast<std::size_t>(source)]);
  for (const SumStep& step : sum.steps) {
    std::vector<std::string> next;
    for (std::size_t i = 0; i < step.left.size(); ++i) {
      const std::string& left = terms[static_cast<std::size_t>(step.left[i])];
      if (i >= step.right.size()) {
        next.push_back(left);
        continue;
      }
      std::string term("(");
      term.append(left).append("+");
      term.append(terms[static_cast<std::size_t>(step.right[i])]).append(")");
      next.push_back(std::move(term));
    }
    terms = std::move(next);
  }
  return terms;
}

TEST(RunSumTest, RunsAreAddedInTheOrderOfTheTable) {
  const std::vector<std::string> wanted = orders();
  ASSERT_GE(wanted.size(), 40U);
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t num_runs = random() % 12;
    std::vector<std::size_t> lengths(num_runs);
    SortedGradients gradients;
    std::vector<std::string> names;
    for (std::size_t r = 0; r < num_runs; ++r) {
      lengths[r] = random() % wanted.size() + 1;
      for (std::size_t i = 0; i < lengths[r]; ++i) names.push_back(std::to_string(i));
    }
    gradients.items.resize(static_cast<std::int64_t>(names.size()));
    std::int64_t next = 0;
    for (std::size_t r = 0; r < num_runs; ++r) {
      for (std::size_t i = 0; i < lengths[r]; ++i, ++next)
        gradients.items[next] = {static_cast<std::uint32_t>(3 * r),
                                 static_cast<std::uint32_t>(next)};
    }
    const RunSum sum = plan_run_sum(gradients);
    const std::vector<std::string> sums = summed(sum, names);
    ASSERT_EQ(sums.size(), num_runs);
    ASSERT_EQ(sum.rows.size(), num_runs);
    for (std::size_t i = 0; i < num_runs; ++i) {
      const std::size_t length = lengths[static_cast<std::size_t>(sum.rows[i]) / 3];
      EXPECT_EQ(sums[i], wanted[length - 1]);
    }
  }
}

}  // namespace
}  // namespace recsdk::run_sum_test
