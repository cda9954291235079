// Which new keys an index lets in, against a plain model of the words of recsdk/policy.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "recsdk/recsdk.h"
#include "util/hash.h"

namespace recsdk::admission_test {
namespace {

using Kind = AdmitTerm::Kind;
using Outcomes = std::vector<Outcome>;
constexpr Outcome kFound = Outcome::kFound;
constexpr Outcome kInserted = Outcome::kInserted;
constexpr Outcome kNotAdmitted = Outcome::kNotAdmitted;

AdmitTerm count(std::int64_t n) { return {.kind = Kind::kCount, .count = n}; }
AdmitTerm chance(double p) { return {.kind = Kind::kProbability, .probability = p}; }
AdmitTerm join(Kind kind) { return {.kind = kind}; }

Outcomes map(Index& index, const std::vector<Key>& keys, const Lease* lease = nullptr,
             std::span<const std::int64_t> counts = {}) {
  std::vector<RowNumber> rows(keys.size());
  Outcomes outcomes(keys.size());
  index.map(keys, rows, outcomes, {true, lease, {{}, {}, counts, {}}});
  return outcomes;
}

/// One rule of a count, without max_rows.
class CountModel {
 public:
  CountModel(std::int64_t n, std::optional<std::int64_t> max_records)
      : n_(n), max_records_(max_records) {}

  Outcomes see(const std::vector<Key>& keys) {
    ++step_;
    std::map<Key, std::int64_t> seen;
    for (const Key key : keys) ++seen[key];
    std::set<Key> let_in;
    std::set<std::pair<std::uint64_t, Key>> fresh;  // by hash
    for (const auto& [key, occurrences] : seen) {
      if (rows_.contains(key)) continue;
      const auto record = records_.find(key);
      const std::int64_t total =
          occurrences + (record == records_.end() ? 0 : record->second.count);
      if (total >= n_) let_in.insert(key);
      if (record != records_.end()) {
        record->second = {key, total, step_};
      } else if (total < n_) {
        fresh.emplace(hash(key), key);
      }
    }
    make_room(fresh);  // records of those that are let in go afterwards
    for (const Key key : let_in) records_.erase(key);
    for (const auto& [hash, key] : fresh) records_[key] = {key, seen[key], step_};
    Outcomes outcomes;
    for (const Key key : keys) {
      const bool is_new = let_in.contains(key) && rows_.insert(key).second;
      outcomes.push_back(is_new ? kInserted : rows_.contains(key) ? kFound : kNotAdmitted);
    }
    return outcomes;
  }

  std::int64_t num_records() const { return std::ssize(records_); }
  std::uint64_t num_lost() const { return num_lost_; }

 private:
  static std::uint64_t hash(Key key) {
    return internal::virtual_shard_hash(static_cast<std::uint64_t>(key));
  }

  // In each group the lowest by (step, hash) leave, then the lowest new ones find no room.
  void make_room(std::set<std::pair<std::uint64_t, Key>>& fresh) {
    if (!max_records_) return;
    const std::int64_t groups = default_eviction_groups(*max_records_);
    for (std::int64_t group = 0; group < groups; ++group) {
      std::set<std::tuple<std::int64_t, std::uint64_t, Key>> held;
      for (const auto& [key, record] : records_) {
        if (eviction_group(key, groups) == group) held.emplace(record.step, hash(key), key);
      }
      std::int64_t excess = std::ssize(held) - eviction_group_quota(*max_records_, groups, group);
      for (const auto& each : fresh) excess += eviction_group(each.second, groups) == group ? 1 : 0;
      for (const auto& [step, hash, key] : held) {
        if (excess <= 0 || step == step_) break;
        records_.erase(key);
        ++num_lost_;
        --excess;
      }
      for (auto it = fresh.begin(); it != fresh.end() && excess > 0;) {
        const bool is_here = eviction_group(it->second, groups) == group;
        it = is_here ? fresh.erase(it) : std::next(it);
        excess -= is_here ? 1 : 0;
      }
    }
  }

  std::int64_t n_;
  std::optional<std::int64_t> max_records_;
  std::int64_t step_ = 0;
  std::set<Key> rows_;
  std::map<Key, AdmitRecord> records_;
  std::uint64_t num_lost_ = 0;
};

TEST(Admission, AddsUpShowsAndClicks) {
  const AdmitTerm worth{.kind = Kind::kShowClick, .alpha = 0.5, .beta = 2.0, .threshold = 3.0};
  Index index({.admission = AdmitConfig{.rule = {worth}}});
  const std::vector<Key> keys = {1, 2, 2};
  std::vector<RowNumber> rows(3);
  Outcomes outcomes(3);
  const auto see = [&](std::vector<std::int64_t> clicks) {
    index.map(keys, rows, outcomes, {true, nullptr, {{}, {}, {}, clicks}});
    return outcomes;
  };
  EXPECT_EQ(see({1, 0, 0}), (Outcomes{kNotAdmitted, kNotAdmitted, kNotAdmitted}));
  EXPECT_EQ(see({0, 0, 0}), (Outcomes{kInserted, kNotAdmitted, kNotAdmitted}));  // 3 and 2
  EXPECT_EQ(admission_records(index), (std::vector<AdmitRecord>{{2, 4, 2, 0}}));
  EXPECT_EQ(see({5, 0, 1}), (Outcomes{kFound, kInserted, kFound}));
  EXPECT_THROW(map(index, {3}), std::invalid_argument);
  EXPECT_NO_THROW(map(index, {}));
}

TEST(Admission, ClicksOfAStepAreNotKept) {
  const AdmitTerm worth{.kind = Kind::kShowClickOfStep, .beta = 1.0, .threshold = 9.0};
  Index index({.admission = AdmitConfig{.rule = {worth, count(8), join(Kind::kAny)}}});
  assign_with_metadata(index, {}, {}, {}, std::vector<AdmitRecord>{{5, 2, 1, 6}});
  EXPECT_EQ(admission_records(index), (std::vector<AdmitRecord>{{5, 2, 1, 0}}));
}

TEST(Admission, CountsAsAModelDoes) {
  for (const std::optional<std::int64_t> limit :
       {std::optional<std::int64_t>(), {40}, {300}, {9000}}) {
    std::mt19937_64 random(7);
    std::geometric_distribution<Key> rank(0.004);
    Index index(
        {.hash_seed = 3, .admission = AdmitConfig{.rule = {count(3)}, .max_records = limit}});
    CountModel model(3, limit);
    for (int step = 0; step < 30; ++step) {
      std::vector<Key> keys(300);
      for (Key& key : keys) {
        const auto number = static_cast<std::uint64_t>(rank(random) + 20 * step);
        key = static_cast<Key>(number * 0x9E3779B97F4A7C1U);
      }
      ASSERT_EQ(map(index, keys), model.see(keys)) << "step " << step;
      const IndexStats stats = index.stats();
      ASSERT_EQ(stats.admission_records, model.num_records());
      ASSERT_EQ(stats.records_lost, model.num_lost());
      ASSERT_NO_THROW(index.check_invariants());
    }
    EXPECT_GT(index.size(), 300);
    EXPECT_EQ(model.num_lost() > 0, limit == 40 || limit == 300);
  }
}

// What a step decides is the same in whatever calls it comes, but that earlier calls are not taken
// back: so the keys that have a row in the end are.
TEST(Admission, AStepMayComeInPieces) {
  const AdmitConfig rule{
      .rule = {count(4), chance(0.4), join(Kind::kAll), chance(0.1), join(Kind::kAny)}, .salt = 11};
  std::mt19937_64 random(5);
  Index whole({.hash_seed = 1, .admission = rule});
  Index cut({.hash_seed = 2, .num_threads = 1, .admission = rule});
  for (std::int64_t step = 1; step < 20; ++step) {
    std::vector<Key> keys(200);
    for (Key& key : keys) key = static_cast<Key>(random() % 400);
    const Lease all = whole.lease(step);
    map(whole, keys, &all);
    std::shuffle(keys.begin(), keys.end(), random);
    const Lease part = cut.lease(step);
    map(cut, {keys.begin(), keys.begin() + 70}, &part);
    map(cut, {keys.begin() + 70, keys.end()}, &part);
  }
  for (Key key = 0; key < 400; ++key) {
    Outcome has[2];
    RowNumber row = 0;
    whole.map({&key, 1}, {&row, 1}, {has, 1}, {false, nullptr});
    cut.map({&key, 1}, {&row, 1}, {has + 1, 1}, {false, nullptr});
    ASSERT_EQ(has[0], has[1]) << "key " << key;
  }
  EXPECT_GT(whole.size(), 20);
  EXPECT_LT(whole.size(), 380);
}

// All keys of a virtual shard share the four counters of a sketch with one column.
TEST(Admission, ASketchCountsWhatStepsLeftWithoutARow) {
  const AdmitTerm third{.kind = Kind::kCountSketch, .count = 3};
  Index index({.admission = AdmitConfig{.rule = {third}, .max_bytes = kFewestSketchBytes}});
  const auto key = [](std::uint64_t number) {
    return static_cast<Key>(internal::virtual_shard_key(number << 16U | 7U));
  };
  EXPECT_EQ(map(index, {key(1), key(2)}), Outcomes(2, kNotAdmitted));  // each came once
  const std::int64_t all_rows = 2 * 0x0001000100010001;
  EXPECT_EQ(admission_records(index), (std::vector<AdmitRecord>{{key(0), all_rows}}));
  {
    const Lease lease = index.lease(5);
    EXPECT_EQ(map(index, {key(3)}, &lease), Outcomes{kInserted});  // two were counted before
    EXPECT_EQ(map(index, {9, 9}, &lease), Outcomes(2, kNotAdmitted));
    EXPECT_EQ(admission_records(index).size(), 1);  // to readers
    EXPECT_EQ(map(index, {9}, &lease), Outcomes{kInserted});
  }
  EXPECT_EQ(admission_records(index), (std::vector<AdmitRecord>{{key(0), all_rows}}));
  EXPECT_EQ(index.stats().admission_records, 0);
  EXPECT_EQ(standing_of(index, key(4)).seen, 2);
  index.check_invariants();
}

TEST(Admission, ACountStandsForOccurrences) {
  Index index({.admission = AdmitConfig{.rule = {count(5)}}});
  const std::int64_t twice[] = {2};
  EXPECT_EQ(map(index, {1, 1, 2}, nullptr, twice), Outcomes(3, kNotAdmitted));
  const std::int64_t each[] = {1, INT64_MAX, INT64_MAX};
  EXPECT_EQ(map(index, {1, 2, 2}, nullptr, each), (Outcomes{kInserted, kInserted, kFound}));
  const std::int64_t none[] = {0};
  EXPECT_THROW(map(index, {1}, nullptr, none), std::invalid_argument);
  EXPECT_THROW(map(index, {1, 2}, nullptr, each), std::invalid_argument);
  Index plain({.name = "plain"});
  EXPECT_THROW(map(plain, {1}, nullptr, twice), std::invalid_argument);
}

TEST(Admission, ARuleThatMakesNoSenseIsRefusedByField) {
  const auto expect_refused = [](const AdmitConfig& config, const std::string& field,
                                 std::optional<std::int64_t> max_rows = std::nullopt) {
    try {
      const Index made({.max_rows = max_rows, .admission = config});
      ADD_FAILURE() << field << " was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("admission." + field), std::string::npos)
          << error.what();
    }
  };
  expect_refused({}, "rule must have 1 to 63 terms, got 0");
  expect_refused({.rule = std::vector<AdmitTerm>(65, count(1))},
                 "rule must have 1 to 63 terms, got 65");
  expect_refused({.rule = {count(0)}}, "count must be 1 to 2147483647, got 0");
  expect_refused({.rule = {chance(0.0)}}, "probability must be above 0, up to 1, got 0");
  expect_refused({.rule = {chance(1.5)}}, "probability must be above 0, up to 1, got 1.5");
  expect_refused({.rule = {chance(std::nextafter(1.0, 2.0))}},
                 "probability must be above 0, up to 1, got 1.0000000000000002");
  const auto worth = [](double alpha, double beta, double threshold) {
    return AdmitTerm{
        .kind = Kind::kShowClick, .alpha = alpha, .beta = beta, .threshold = threshold};
  };
  expect_refused({.rule = {worth(-1.0, 0.0, 1.0)}}, "alpha must be finite and 0 or more, got -1");
  expect_refused({.rule = {worth(0.0, 0.0, 1.0)}}, "alpha or beta must be above 0");
  expect_refused({.rule = {worth(1.0, 0.0, 0.0)}}, "threshold must be finite and above 0, got 0");
  expect_refused({.rule = {count(1), join(Kind::kAll)}}, "rule joins terms");
  expect_refused({.rule = {count(1), count(1)}}, "rule has terms that are not joined");
  expect_refused({.rule = {join(static_cast<Kind>(9))}},
                 "kind must be one of AdmitTerm::Kind, got 9");
  expect_refused({.rule = {count(2)}, .max_records = 0}, "max_records must be 1 or more, got 0");
  expect_refused({.rule = {count(2)}, .max_records = 5},
                 "max_records must be at least the number of groups of keys", 2000);
  expect_refused({.rule = {chance(0.5)}, .max_records = 5}, "max_records is given");
  const AdmitTerm sketch{.kind = Kind::kCountSketch, .count = 2};
  expect_refused({.rule = {sketch}}, "max_bytes is missing");
  expect_refused({.rule = {sketch}, .max_bytes = 524'287},
                 "max_bytes must be 524288 or more, got 524287");
  expect_refused({.rule = {count(2)}, .max_bytes = 1 << 20}, "max_bytes is given");
  expect_refused({.rule = {sketch, count(2), join(Kind::kAny)}, .max_bytes = 1 << 20},
                 "rule has a sketch");
  expect_refused({.rule = {{.kind = Kind::kCountSketch, .count = 32'768}}, .max_bytes = 1 << 20},
                 "count must be 1 to 32767, got 32768");
}

}  // namespace
}  // namespace recsdk::admission_test
