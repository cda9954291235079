// Where rows stand by a function of `now`, against a map from each row to what it was shown as.
#include "eviction/row_kinds.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "eviction/row_meta.h"
#include "rows/row_bits.h"
#include "rows/row_numbers.h"

namespace recsdk::internal::row_kinds_test {
namespace {

constexpr std::int64_t kRows = 150;

float place_of(std::int64_t now, std::int64_t step, std::int64_t count) {
  return static_cast<float>(count) - 0.25F * static_cast<float>((now - step) % 7);
}

RowMeta meta_of_counts() {
  EvictConfig config;
  config.order = EvictOrder::kFunction;
  config.function = [](const EvictColumns&, std::span<double>) {};
  config.keeps_counts = true;
  return RowMeta(config);
}

/// Rows of which some have keys, and where each stands.
class Machine {
 public:
  Machine(unsigned seed, std::size_t most_kinds, std::int64_t num_steps)
      : random_(seed), most_kinds_(most_kinds), num_steps_(num_steps), kinds_(meta_, most_kinds) {
    numbers_.prepare_allocate(kRows);
    numbers_.prepare_free(kRows);
    kinds_.grow(kRows);
    low_.grow(kRows);
  }

  void insert() {
    if (std::ssize(expected_) == kRows) return;
    const std::uint32_t row = numbers_.allocate(++last_key_, RowState::kVisible);
    meta_.begin(numbers_.meta(row), some_step(), false);
    kinds_.begin(row);
    expected_[row] = std::numeric_limits<float>::infinity();
    unmeasured_.insert(row);
  }
  void see() {
    if (expected_.empty()) return;
    const std::uint32_t row = some_row();
    meta_.touch(numbers_.meta(row), some_step(), {});
    unmeasured_.insert(row);
  }
  void leave() {
    if (expected_.empty()) return;
    const std::uint32_t row = some_row();
    numbers_.free(row, 0);
    numbers_.release_before(1);
    numbers_.prepare_free(kRows);
    expected_.erase(row);
    unmeasured_.erase(row);
  }
  void look() {
    RowKinds::Before before;
    const bool fails = random_() % 4 == 0;
    const std::vector<std::uint32_t> rows(unmeasured_.begin(), unmeasured_.end());
    kinds_.learn(rows, numbers_, before);
    if (fails && random_() % 2 == 0) return kinds_.take_back(before);
    kinds_.find_used(numbers_);
    const std::vector<float> places = ask();
    kinds_.set_places(places, before);
    if (fails) return kinds_.take_back(before);
    unmeasured_.clear();
    const auto old = expected_;
    for (auto& [row, place] : expected_) {
      const auto shown = meta_.shown(numbers_.meta(row));
      place = place_of(now_, shown.step, shown.count);
    }
    check_shifted(old, before);
  }
  void check() const {
    for (const auto& [row, place] : expected_) {
      ASSERT_EQ(kinds_.place(row, numbers_.meta(row)), place) << row;
      ASSERT_LE(kinds_.kind_of(row), most_kinds_) << row;
    }
  }

 private:
  // Few different ones, or nearly all.
  std::int64_t some_step() { return static_cast<std::int64_t>(random_()) % num_steps_; }
  std::uint32_t some_row() {
    auto chosen = expected_.begin();
    std::advance(chosen, static_cast<std::ptrdiff_t>(random_() % expected_.size()));
    return chosen->first;
  }
  std::vector<float> ask() {
    constexpr std::size_t kAtOnce = 40;
    ++now_;
    std::vector<float> places;
    std::set<std::pair<std::int64_t, std::int64_t>> asked;
    while (places.size() < kinds_.num_used()) {
      const Columns columns = kinds_.columns(places.size(), kAtOnce);
      for (std::size_t i = 0; i < columns.size(); ++i) {
        EXPECT_TRUE(asked.emplace(columns.steps[i], columns.counts[i]).second);
        places.push_back(place_of(now_, columns.steps[i], columns.counts[i]));
      }
    }
    return places;
  }
  void check_shifted(const std::map<std::uint32_t, float>& old, RowKinds::Before& before) {
    constexpr float kBorder = 2.0F;
    kinds_.find_shifted(numbers_, before);
    kinds_.mark_low(kBorder, numbers_, low_);
    for (const auto& [row, place] : expected_) {
      const std::uint64_t word = before.shifted[row / kWordRows];
      ASSERT_EQ((word & bit_of(row)) != 0, old.at(row) != place) << row;
      ASSERT_EQ(low_.test(row), place < kBorder) << row;
    }
  }

  std::mt19937 random_;
  const std::size_t most_kinds_;
  const std::int64_t num_steps_;
  const RowMeta meta_ = meta_of_counts();
  RowNumbers numbers_{meta_.num_words()};
  RowKinds kinds_;
  RowBits low_;
  std::map<std::uint32_t, float> expected_;  // where rows that have keys stand
  std::set<std::uint32_t> unmeasured_;
  std::int64_t now_ = 100'000;
  Key last_key_ = 0;
};

void run(std::size_t most_kinds) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Machine machine(seed, most_kinds, seed % 2 == 0 ? 5 : 50'000);
    for (int i = 0; i < 600; ++i) {
      const auto chosen = random() % 40;
      if (chosen < 14) machine.insert();
      if (chosen >= 14 && chosen < 34) machine.see();
      if (chosen >= 34 && chosen < 38) machine.leave();
      if (chosen >= 38) machine.look();
      ASSERT_NO_FATAL_FAILURE(machine.check());
    }
  }
}

TEST(RowKindsTest, StandAsTheFunctionSays) { run(kMaxRows); }

// As if there were four thousand million rows: numbers of kinds run out at nearly every look.
TEST(RowKindsTest, AsManyKindsAsRowsAreEnough) { run(kRows); }

}  // namespace
}  // namespace recsdk::internal::row_kinds_test
