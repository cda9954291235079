// The index of the C interface: row numbers of keys whose rows the program keeps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/c_api.h"
#include "recsdk/row_layout.h"

namespace recsdk::test::c_api_index_test {
namespace {

using Keys = std::vector<std::int64_t>;
using Bytes = std::vector<std::uint8_t>;
using Places = std::map<std::int64_t, std::int64_t>;

struct DestroyIndex {
  void operator()(recsdk_index* index) const { recsdk_index_destroy(index); }
};
using IndexHandle = std::unique_ptr<recsdk_index, DestroyIndex>;

void expect_ok(int status) { EXPECT_EQ(status, RECSDK_OK) << recsdk_last_error_message(); }

recsdk_index_config index_defaults() {
  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  expect_ok(recsdk_index_config_init(&config));
  return config;
}

IndexHandle make_index(const recsdk_index_config& config) {
  recsdk_index* index = nullptr;
  EXPECT_EQ(recsdk_index_create(&config, &index), RECSDK_OK) << recsdk_last_error_message();
  return IndexHandle(index);
}

struct Mapped {
  Keys rows;
  Bytes outcomes;
};

Mapped map(recsdk_index* index, const Keys& keys, int insert = 1,
           const recsdk_lease* lease = nullptr) {
  Mapped found{Keys(keys.size()), Bytes(keys.size())};
  expect_ok(recsdk_index_map(index, keys.data(), std::ssize(keys), insert, lease, found.rows.data(),
                             found.outcomes.data()));
  return found;
}

std::int64_t size_of(const recsdk_index* index) {
  std::int64_t size = -1;
  expect_ok(recsdk_index_size(index, &size));
  return size;
}

recsdk_stats stats_of(const recsdk_index* index) {
  recsdk_stats stats{};
  stats.struct_size = sizeof(stats);
  expect_ok(recsdk_index_stats(index, &stats));
  return stats;
}

/// All keys and their rows, a few at a time.
Places exported(const recsdk_index* index) {
  constexpr std::int64_t kFew = 3;
  Places found;
  std::int64_t begin = 0;
  for (std::int64_t n = kFew; n == kFew;) {
    Keys keys(kFew);
    Keys rows(kFew);
    expect_ok(recsdk_index_export_keys(index, &begin, kFew, keys.data(), rows.data(), &n));
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) found[keys[i]] = rows[i];
  }
  return found;
}

/// A cut of the index, which ends as `durable` says, brings what a reader has kept up to date.
void bring_up_to_date(recsdk_index* index, bool changes_only, bool durable, Places& kept) {
  recsdk_index_cut* cut = nullptr;
  ASSERT_EQ(recsdk_index_cut_begin(index, changes_only ? 1 : 0, &cut), RECSDK_OK)
      << recsdk_last_error_message();
  recsdk_index_cut* second = nullptr;
  expect_failure(recsdk_index_cut_begin(index, 0, &second), RECSDK_ERROR_BUSY, "a cut is open");
  recsdk_index_changes changes{};
  changes.struct_size = sizeof(changes);
  expect_ok(recsdk_index_cut_read(cut, &changes));
  if (!changes_only) kept.clear();
  const std::span left(changes.left, static_cast<std::size_t>(changes.num_left));
  EXPECT_TRUE(changes_only || left.empty());
  EXPECT_TRUE(std::ranges::is_sorted(left));
  for (std::size_t i = 0; i < left.size(); ++i) {
    kept.erase(left[i]);
    EXPECT_EQ(changes.causes[i], RECSDK_LEFT_ERASED);
  }
  for (std::int64_t i = 0; i < changes.num_keys; ++i) kept[changes.keys[i]] = changes.rows[i];
  recsdk_index_cut_finish(cut, durable ? 1 : 0);
}

// A program of random calls beside a map. `kept` is what a reader knows who follows by cuts.
class Program {
 public:
  explicit Program(std::uint32_t seed) : random_(seed), index_(make_index(index_defaults())) {}

  void run(int num_calls) {
    for (int i = 0; i < num_calls; ++i) {
      call(static_cast<int>(random_() % 20));
      EXPECT_EQ(size_of(index_.get()), std::ssize(places_));
      expect_ok(recsdk_index_check_invariants(index_.get()));
    }
    EXPECT_EQ(exported(index_.get()), places_);
    EXPECT_EQ(stats_of(index_.get()).erased, num_erased_);
    EXPECT_EQ(stats_of(index_.get()).outcomes[RECSDK_OUTCOME_INSERTED], num_inserted_);
  }

 private:
  void call(int number) {
    if (number < 8) return insert(keys());
    if (number < 10) return look(keys());
    if (number < 14) return erase(keys());
    if (number < 17) return follow();
    if (number == 17) return assign();
    if (number == 18) return clear();
    expect_ok(recsdk_index_reserve(index_.get(), static_cast<std::int64_t>(random_() % 2000)));
  }

  Keys keys() {
    Keys drawn(random_() % 6);
    for (std::int64_t& key : drawn) key = static_cast<std::int64_t>(random_() % 12) - 6;
    return drawn;
  }

  void insert(const Keys& keys) {
    const Mapped found = map(index_.get(), keys);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto [place, is_new] = places_.emplace(keys[i], found.rows[i]);
      EXPECT_EQ(place->second, found.rows[i]);
      EXPECT_EQ(found.outcomes[i], is_new ? RECSDK_OUTCOME_INSERTED : RECSDK_OUTCOME_FOUND);
      num_inserted_ += is_new ? 1 : 0;
    }
    std::set<std::int64_t> rows;
    for (const auto& [key, row] : places_) rows.insert(row);
    EXPECT_EQ(rows.size(), places_.size()) << "two keys have one row";
    std::int64_t end_row = -1;
    expect_ok(recsdk_index_end_row(index_.get(), &end_row));
    EXPECT_TRUE(rows.empty() || *rows.rbegin() < end_row);
  }

  void look(const Keys& keys) {
    const Mapped found = map(index_.get(), keys, 0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto place = places_.find(keys[i]);
      EXPECT_EQ(found.outcomes[i],
                place == places_.end() ? RECSDK_OUTCOME_MISSING : RECSDK_OUTCOME_FOUND);
      if (place != places_.end()) {
        EXPECT_EQ(found.rows[i], place->second);
      }
    }
  }

  void erase(const Keys& keys) {
    Bytes outcomes(keys.size());
    expect_ok(recsdk_index_erase(index_.get(), keys.data(), std::ssize(keys), outcomes.data()));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const bool was_there = places_.erase(keys[i]) == 1;
      EXPECT_EQ(outcomes[i], was_there ? RECSDK_OUTCOME_FOUND : RECSDK_OUTCOME_MISSING);
      num_erased_ += was_there ? 1 : 0;
    }
  }

  void clear() {
    expect_ok(recsdk_index_clear(index_.get()));
    num_erased_ += places_.size();
    places_.clear();
  }

  // What an assignment replaces is no news of a cut: the reader begins with it.
  void assign() {
    const Keys drawn = keys();
    const std::set<std::int64_t> distinct(drawn.begin(), drawn.end());
    const Keys keys(distinct.begin(), distinct.end());
    expect_ok(recsdk_index_assign(index_.get(), keys.data(), std::ssize(keys)));
    places_.clear();
    for (std::size_t i = 0; i < keys.size(); ++i) places_[keys[i]] = static_cast<std::int64_t>(i);
    kept_ = places_;
    EXPECT_TRUE(is_tracking());
  }

  void follow() {
    const bool changes_only = is_tracking() && random_() % 4 != 0;
    const bool durable = random_() % 2 == 0;
    Places kept = kept_;
    bring_up_to_date(index_.get(), changes_only, durable, kept);
    EXPECT_EQ(kept, places_);
    if (durable) kept_ = kept;
  }

  bool is_tracking() const {
    int is_tracking = -1;
    expect_ok(recsdk_index_is_tracking(index_.get(), &is_tracking));
    return is_tracking == 1;
  }

  std::mt19937 random_;
  IndexHandle index_;
  Places places_;
  Places kept_;
  std::uint64_t num_erased_ = 0;
  std::uint64_t num_inserted_ = 0;
};

TEST(CApiIndexTest, AnyCallsGiveWhatAMapGives) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Program(seed).run(100);
    if (HasFailure()) return;
  }
}

TEST(CApiIndexTest, NotedRowsAreAmongTheChanges) {
  const IndexHandle index = make_index(index_defaults());
  recsdk_index_cut* none = nullptr;
  expect_invalid(recsdk_index_cut_begin(index.get(), 1, &none), "of all keys as durable first");
  const Keys rows = map(index.get(), {4, 5, 6}).rows;
  Places kept;
  bring_up_to_date(index.get(), false, true, kept);
  expect_ok(recsdk_index_note_changed(index.get(), &rows[1], 1));
  Places changed;
  bring_up_to_date(index.get(), true, true, changed);
  EXPECT_EQ(changed, (Places{{5, rows[1]}}));
  const std::int64_t beyond = 1000;
  expect_invalid(recsdk_index_note_changed(index.get(), &beyond, 1), "");
}

TEST(CApiIndexTest, ExportedRowsLieOverNoKeys) {
  const IndexHandle index = make_index(index_defaults());
  map(index.get(), {4, 5});
  std::int64_t begin = 0;
  std::int64_t n = 0;
  Keys both(3);
  expect_invalid(recsdk_index_export_keys(index.get(), &begin, 2, both.data(), both.data() + 1, &n),
                 "rows lie over its keys");
  EXPECT_EQ(begin, 0);
  EXPECT_EQ(both, Keys(3));
}

TEST(CApiIndexTest, ALeaseHidesItsKeysAndKeepsAnAssignmentOut) {
  const IndexHandle index = make_index(index_defaults());
  recsdk_lease* lease = nullptr;
  expect_ok(recsdk_index_lease(index.get(), 1, 7, &lease));
  map(index.get(), {1, 2}, 1, lease);
  EXPECT_EQ(size_of(index.get()), 0);
  expect_failure(recsdk_index_check_idle(index.get()), RECSDK_ERROR_BUSY, "leases");
  expect_failure(recsdk_index_assign(index.get(), nullptr, 0), RECSDK_ERROR_BUSY, "leases");
  recsdk_lease_release(lease);
  EXPECT_EQ(size_of(index.get()), 2);
  expect_ok(recsdk_index_check_idle(index.get()));
}

struct MadeRows {
  Places places;
  int result = 0;
};

int note_rows(void* user_data, const std::int64_t* keys, const std::uint32_t* rows,
              std::int64_t num_rows) {
  auto& made = *static_cast<MadeRows*>(user_data);
  for (std::int64_t i = 0; i < num_rows; ++i) made.places[keys[i]] = rows[i];
  return made.result;
}

TEST(CApiIndexTest, ACallbackMakesTheRowsOfNewKeysOrTakesThemBack) {
  MadeRows made;
  recsdk_index_config config = index_defaults();
  config.make_rows = note_rows;
  config.user_data = &made;
  const IndexHandle index = make_index(config);
  map(index.get(), {9, -9, 9});
  EXPECT_EQ(made.places, exported(index.get()));
  made.result = 3;
  const std::int64_t key = 1;
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  expect_failure(recsdk_index_map(index.get(), &key, 1, 1, nullptr, &row, &outcome),
                 RECSDK_ERROR_INTERNAL, "returned 3");
  EXPECT_EQ(size_of(index.get()), 2);
}

TEST(CApiIndexTest, ManyIndexesAreMappedAtOnce) {
  const IndexHandle one = make_index(index_defaults());
  const IndexHandle other = make_index(index_defaults());
  const Keys keys = {3, 1, 3};
  std::vector<Mapped> found(2, {Keys(3), Bytes(3)});
  std::vector<recsdk_index_map_call> calls(2);
  for (std::size_t i = 0; i < 2; ++i) {
    calls[i] = {.index = i == 0 ? one.get() : other.get(),
                .keys = keys.data(),
                .num_keys = 3,
                .lease = nullptr,
                .rows = found[i].rows.data(),
                .outcomes = found[i].outcomes.data(),
                .insert = i == 0 ? 1 : 0,
                .reserved = 0};
  }
  expect_ok(recsdk_map_indexes(calls.data(), 2));
  EXPECT_EQ(found[0].rows, (Keys{0, 1, 0}));
  EXPECT_EQ(found[1].outcomes, Bytes(3, RECSDK_OUTCOME_MISSING));
  calls[1].index = one.get();
  expect_invalid(recsdk_map_indexes(calls.data(), 2), "");
}

int choose_negative(void*, const std::int64_t* keys, const std::int64_t*, std::int64_t num_keys,
                    std::int64_t, std::int64_t, std::uint8_t* leaves) {
  for (std::int64_t i = 0; i < num_keys; ++i) leaves[i] = keys[i] < 0 ? 1 : 0;
  return 0;
}

TEST(CApiIndexTest, KeysLeaveByALimitAChoiceOrTheirAge) {
  recsdk_evict_config rule{};
  rule.struct_size = sizeof(rule);
  expect_ok(recsdk_evict_config_init(&rule));
  rule.ttl = 2;
  rule.has_ttl = 1;
  rule.expire_every = 1000;
  recsdk_index_config config = index_defaults();
  config.max_rows = 6;
  config.has_max_rows = 1;
  config.eviction_groups = 1;
  config.has_eviction_groups = 1;
  config.eviction = &rule;
  const IndexHandle index = make_index(config);
  map(index.get(), {-1, -2, 3, 4});
  std::int64_t count = -1;
  expect_ok(recsdk_index_would_evict(index.get(), 3, &count));
  EXPECT_EQ(count, 1);
  expect_ok(recsdk_index_evict_where(index.get(), choose_negative, nullptr, 1, &count));
  EXPECT_EQ(count, 2);
  EXPECT_EQ(size_of(index.get()), 4) << "nobody has left";
  expect_ok(recsdk_index_evict_where(index.get(), choose_negative, nullptr, 0, &count));
  EXPECT_EQ(count, 2);
  for (int step = 0; step < 3; ++step) map(index.get(), {3});
  expect_ok(recsdk_index_expire(index.get(), 1, &count));
  EXPECT_EQ(count, 1);
  expect_ok(recsdk_index_expire(index.get(), 0, &count));
  EXPECT_EQ(count, 1);
  EXPECT_EQ(exported(index.get()).begin()->first, 3);
  EXPECT_EQ(stats_of(index.get()).evicted, 2U);
  EXPECT_EQ(stats_of(index.get()).expired, 1U);
}

TEST(CApiIndexTest, InitialWeightsAreThoseOfATable) {
  recsdk_initializer_config initializer = default_initializer();
  initializer.kind = RECSDK_INITIALIZER_NORMAL;
  recsdk_table_config config = default_config(5);
  config.name = "item";
  config.seed = 11;
  config.initializer = &initializer;
  const TableHandle table = make_table(config);
  const Keys keys = {-1, 0, 1LL << 62};
  std::vector<float> wanted(15);
  expect_ok(
      recsdk_table_find_or_insert(table.get(), keys.data(), 3, nullptr, wanted.data(), nullptr));
  std::vector<float> made(15);
  expect_ok(recsdk_initial_weights(&initializer, 11, "item", 5, keys.data(), 3, made.data()));
  EXPECT_EQ(made, wanted);
  for (const std::int64_t dim :
       {std::int64_t{0}, std::int64_t{-1}, recsdk::kMaxDim + 1, INT64_MAX}) {
    expect_invalid(
        recsdk_initial_weights(&initializer, 11, "item", dim, keys.data(), 3, made.data()),
        "initial_weights: dim must be 1 to 1048576, got " + std::to_string(dim));
  }
  EXPECT_EQ(made, wanted);
}

}  // namespace
}  // namespace recsdk::test::c_api_index_test
