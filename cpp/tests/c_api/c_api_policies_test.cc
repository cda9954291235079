// Who leaves a table of the C interface, and reading who has left.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/c_api.h"

namespace recsdk::test::c_api_policies_test {
namespace {

using Keys = std::vector<std::int64_t>;
using Bytes = std::vector<std::uint8_t>;

struct DestroyLeavers {
  void operator()(recsdk_leavers* leavers) const { recsdk_leavers_destroy(leavers); }
};
using LeaversHandle = std::unique_ptr<recsdk_leavers, DestroyLeavers>;

recsdk_evict_config evict_by(std::int32_t order, std::int32_t clock = RECSDK_EVICT_BY_STEP) {
  recsdk_evict_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_evict_config_init(&config), RECSDK_OK);
  EXPECT_EQ(config.order, RECSDK_EVICT_LRU);
  config.order = order;
  config.clock = clock;
  return config;
}

TableHandle table_of(const recsdk_evict_config& eviction, std::int64_t max_rows) {
  recsdk_table_config config = default_config(2);
  config.max_rows = max_rows;
  config.has_max_rows = 1;
  config.eviction_groups = 1;
  config.has_eviction_groups = 1;
  config.eviction = &eviction;
  return make_table(config);
}

/// Whether keys came, were there or were refused.
Bytes map(recsdk_table* table, const Keys& keys, const recsdk_key_data* data = nullptr) {
  Keys rows(keys.size());
  Bytes outcomes(keys.size());
  EXPECT_EQ(recsdk_table_map_with(table, keys.data(), std::ssize(keys), nullptr, data, rows.data(),
                                  outcomes.data()),
            RECSDK_OK)
      << recsdk_last_error_message();
  return outcomes;
}

bool has(const recsdk_table* table, std::int64_t key) {
  std::vector<float> row(2);
  std::uint8_t outcome = 0;
  EXPECT_EQ(recsdk_table_lookup(table, &key, 1, row.data(), &outcome), RECSDK_OK);
  return outcome == RECSDK_OUTCOME_FOUND;
}

LeaversHandle leavers_of(recsdk_table* table, const recsdk_leavers_options* options = nullptr) {
  recsdk_leavers* leavers = nullptr;
  EXPECT_EQ(recsdk_table_leavers(table, options, &leavers), RECSDK_OK)
      << recsdk_last_error_message();
  return LeaversHandle(leavers);
}

TEST(CApiPoliciesTest, RowsDoNotLieOverTimes) {
  const TableHandle table = table_of(evict_by(RECSDK_EVICT_LRU, RECSDK_EVICT_BY_TIME), 8);
  const Keys keys = {7, 8};
  Keys times = {1000, 2000};
  Bytes outcomes(2);
  recsdk_key_data data{};
  data.times = times.data();
  data.num_times = 2;
  EXPECT_EQ(recsdk_table_map_with(table.get(), keys.data(), 2, nullptr, &data, times.data(),
                                  outcomes.data()),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(recsdk_last_error_message()).find("rows lie over its times"),
            std::string::npos);
  EXPECT_EQ(times, (Keys{1000, 2000}));
  EXPECT_FALSE(has(table.get(), 7));
}

TEST(CApiPoliciesTest, ATimeThatIsNoneIsOfKeysAlone) {
  const TableHandle table = table_of(evict_by(RECSDK_EVICT_LRU, RECSDK_EVICT_BY_TIME), 8);
  const Keys keys = {7};
  const std::int64_t unknown = std::numeric_limits<std::int64_t>::min();
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  recsdk_key_data data{};
  const auto map_one = [&] {
    return recsdk_table_map_with(table.get(), keys.data(), 1, nullptr, &data, &row, &outcome);
  };
  const auto expect_refused = [](int status, const std::string& what) {
    EXPECT_EQ(status, RECSDK_ERROR_INVALID_ARGUMENT);
    const std::string message = recsdk_last_error_message();
    EXPECT_NE(message.find(what + " must be above -2**63, which stands for none"),
              std::string::npos)
        << message;
  };
  expect_refused(recsdk_table_set_time(table.get(), unknown), "time");
  data.has_now = 1;
  data.now = unknown;
  expect_refused(map_one(), "now");
  data.has_now = 0;
  data.times = &unknown;
  data.num_times = 1;
  EXPECT_EQ(map_one(), RECSDK_OK);
  data.times = nullptr;
  EXPECT_EQ(map_one(), RECSDK_ERROR_INVALID_ARGUMENT);  // no time was set by the call before
  recsdk_restore* restore = nullptr;
  ASSERT_EQ(recsdk_restore_create(table.get(), &restore), RECSDK_OK);
  recsdk_clock clock{};
  clock.struct_size = sizeof(clock);
  clock.has_time = 1;
  clock.time = unknown;
  expect_refused(recsdk_restore_commit_at(restore, 0, 0.0, &clock), "the clock's time");
  EXPECT_TRUE(has(table.get(), 7));
  recsdk_restore_destroy(restore);
}

TEST(CApiPoliciesTest, TheLowestByTheRuleLeaves) {
  const TableHandle lru = table_of(evict_by(RECSDK_EVICT_LRU), 2);
  map(lru.get(), {1});
  map(lru.get(), {2});
  map(lru.get(), {1});
  EXPECT_EQ(map(lru.get(), {3}), Bytes{RECSDK_OUTCOME_INSERTED});
  EXPECT_TRUE(has(lru.get(), 1) && has(lru.get(), 3) && !has(lru.get(), 2));
  EXPECT_EQ(stats_of(lru.get()).evicted, 1U);

  const TableHandle scored = table_of(evict_by(RECSDK_EVICT_SCORE), 2);
  const std::vector<float> scores = {5.0F, -1.0F};
  recsdk_key_data data = {};
  data.scores = scores.data();
  map(scored.get(), {1, 2}, &data);
  map(scored.get(), {3});
  EXPECT_TRUE(has(scored.get(), 1) && !has(scored.get(), 2));

  const TableHandle timed = table_of(evict_by(RECSDK_EVICT_LRU, RECSDK_EVICT_BY_TIME), 2);
  const std::int64_t late = 9;
  recsdk_key_data then = {};
  then.times = &late;
  then.num_times = 1;
  map(timed.get(), {1}, &then);
  ASSERT_EQ(recsdk_table_set_time(timed.get(), 3), RECSDK_OK);
  map(timed.get(), {2});
  map(timed.get(), {3});
  EXPECT_TRUE(has(timed.get(), 1) && !has(timed.get(), 2));

  recsdk_key_data at = {};
  at.has_now = 1;
  at.now = 20;
  map(timed.get(), {4}, &at);
  map(timed.get(), {5});  // at 20 too
  EXPECT_TRUE(has(timed.get(), 4) && has(timed.get(), 5));
  at.reserved = 1;
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  const std::int64_t key = 6;
  expect_invalid(recsdk_table_map_with(timed.get(), &key, 1, nullptr, &at, &row, &outcome),
                 "recsdk_key_data.reserved");
  at.reserved = 0;
  expect_invalid(recsdk_table_map_with(scored.get(), &key, 1, nullptr, &at, &row, &outcome),
                 "now is given, and only calls that insert, with eviction by time, take it");
}

TEST(CApiPoliciesTest, ShowsAndClicksMakeAScore) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_SHOW_CLICK);
  EXPECT_EQ(rule.alpha, 1.0);
  EXPECT_EQ(rule.decay, 1.0);
  rule.beta = 3.0;
  rule.decay = 0.5;
  const TableHandle table = table_of(rule, 2);
  const std::vector<std::int64_t> clicks = {1, 0};
  const std::int64_t twice = 2;
  recsdk_key_data data = {};
  data.counts = &twice;
  data.num_counts = 1;
  data.clicks = clicks.data();
  data.num_clicks = 2;
  map(table.get(), {1, 2}, &data);  // worth 5 and 2
  const std::int64_t none = 0;
  recsdk_key_data shown = {};
  shown.clicks = &none;
  shown.num_clicks = 1;
  map(table.get(), {2}, &shown);  // 2.5 and 2
  map(table.get(), {3}, &shown);
  EXPECT_TRUE(has(table.get(), 1) && has(table.get(), 3) && !has(table.get(), 2));
  const std::vector<std::int64_t> keys = {4};
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  EXPECT_EQ(recsdk_table_map_with(table.get(), keys.data(), 1, nullptr, nullptr, &row, &outcome),
            RECSDK_ERROR_INVALID_ARGUMENT);
}

TEST(CApiPoliciesTest, ShowsSoFarCountAtEachStepAgain) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_SHOW_CLICK_TOTALS);
  rule.decay = 0.5;
  const TableHandle table = table_of(rule, 2);
  map(table.get(), {1, 2, 2, 2});  // worth 1 and 3
  map(table.get(), {1});           // (1 + 2) / 2, and 3 as before
  map(table.get(), {1});           // (1.5 + 3) / 2
  map(table.get(), {3});
  EXPECT_TRUE(has(table.get(), 2) && has(table.get(), 3) && !has(table.get(), 1));
}

// Picks keys with a count below *user_data.
int choose_rare(void* user_data, const std::int64_t* keys, const std::int64_t* words,
                std::int64_t num_keys, std::int64_t num_words, std::int64_t step,
                std::uint8_t* leaves) {
  const std::int64_t least = *static_cast<const std::int64_t*>(user_data);
  if (num_words != 2 || step != 2 || keys == nullptr) return 7;
  for (std::int64_t i = 0; i < num_keys; ++i)
    leaves[i] = static_cast<std::uint8_t>(words[i * num_words + 1] < least * 65'536);
  return 0;
}

TEST(CApiPoliciesTest, KeysLeaveThatACallbackPicks) {
  const TableHandle table = table_of(evict_by(RECSDK_EVICT_LFU), 9);
  map(table.get(), {1, 2, 2, 3, 3});
  map(table.get(), {3});
  std::int64_t least = 2;
  std::int64_t count = 0;
  ASSERT_EQ(recsdk_table_evict_where(table.get(), choose_rare, &least, 1, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(has(table.get(), 1));
  least = 3;
  ASSERT_EQ(recsdk_table_evict_where(table.get(), choose_rare, &least, 0, &count), RECSDK_OK);
  EXPECT_EQ(count, 2);
  EXPECT_TRUE(!has(table.get(), 1) && !has(table.get(), 2) && has(table.get(), 3));
  EXPECT_EQ(stats_of(table.get()).evicted, 2U);
  ASSERT_EQ(recsdk_table_would_evict(table.get(), 0, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(has(table.get(), 3));
  map(table.get(), {4});
  EXPECT_EQ(recsdk_table_evict_where(table.get(), choose_rare, &least, 0, nullptr),
            RECSDK_ERROR_INTERNAL);
  EXPECT_NE(std::string(recsdk_last_error_message()).find("returned 7"), std::string::npos);
  EXPECT_EQ(recsdk_table_evict_where(table.get(), nullptr, nullptr, 0, nullptr),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(table.get(), 3) && has(table.get(), 4));
}

TEST(CApiPoliciesTest, KeysExpire) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_LRU);
  EXPECT_EQ(rule.expire_every, 100);
  rule.ttl = 2;
  rule.has_ttl = 1;
  recsdk_table_config config = default_config(2);  // without max_rows
  config.eviction = &rule;
  const TableHandle table = make_table(config);
  const LeaversHandle leavers = leavers_of(table.get());
  map(table.get(), {1, 2});
  map(table.get(), {3});
  map(table.get(), {2});
  std::int64_t count = 0;
  ASSERT_EQ(recsdk_table_expire(table.get(), 1, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  ASSERT_EQ(recsdk_table_expire(table.get(), 0, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(!has(table.get(), 1) && has(table.get(), 2) && has(table.get(), 3));
  EXPECT_EQ(stats_of(table.get()).expired, 1U);
  std::int64_t key = 0;
  std::uint8_t cause = 9;
  ASSERT_EQ(recsdk_leavers_read(leavers.get(), 1, &key, &cause, nullptr, nullptr, &count),
            RECSDK_OK);
  EXPECT_EQ(std::tuple(key, cause, count), std::tuple(1, RECSDK_LEFT_EXPIRED, 1));
  rule.has_rare_ttl = 1;
  rule.rare_ttl = 2;
  rule.rare_count = 2;
  recsdk_table* none = nullptr;
  expect_invalid(recsdk_table_create(&config, &none), "rare_ttl must be less than ttl");
}

TEST(CApiPoliciesTest, KeysThatComeBackAreCounted) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_LRU);
  EXPECT_EQ(std::pair(rule.churn_steps, rule.churn_records), std::pair(0L, 1L << 20));
  rule.churn_steps = 1;
  const TableHandle table = table_of(rule, 1);
  for (const std::int64_t key : {1, 2, 1, 3, 2, 3, 3}) map(table.get(), {key});
  EXPECT_EQ(stats_of(table.get()).evicted, 5U);
  EXPECT_EQ(stats_of(table.get()).returned, 2U);  // 1 a step after it left, and 3; 2 came too late
  EXPECT_EQ(stats_of(table.get()).churn_lost, 0U);
  rule.churn_records = 0;
  recsdk_table_config config = default_config(2);
  config.has_max_rows = 1;
  config.max_rows = 1;
  config.eviction = &rule;
  recsdk_table* none = nullptr;
  expect_invalid(recsdk_table_create(&config, &none),
                 "churn_records must be 1 to 4294967294, got 0");
}

TEST(CApiPoliciesTest, KeysOfLowNormLeave) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_LOW_NORM);
  rule.expire_every = 1;
  rule.below = 0.25;
  const TableHandle table = table_of(rule, 2);
  const Keys keys{1, 2};
  const std::vector<float> values{3.0F, 4.0F, 0.5F, 0.0F};
  ASSERT_EQ(recsdk_table_upsert(table.get(), keys.data(), 2, values.data(), nullptr, nullptr),
            RECSDK_OK);
  map(table.get(), {3});
  EXPECT_TRUE(has(table.get(), 1) && !has(table.get(), 2) && has(table.get(), 3));
  map(table.get(), {1});  // begins with a look, by which 3 has nearly no norm
  EXPECT_FALSE(has(table.get(), 3));
  EXPECT_EQ(stats_of(table.get()).expired, 1U);
  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  ASSERT_EQ(recsdk_index_config_init(&config), RECSDK_OK);
  config.has_max_rows = 1;
  config.max_rows = 2;
  config.eviction = &rule;
  recsdk_index* none = nullptr;
  expect_invalid(recsdk_index_create(&config, &none), "reads weights");
}

struct Placing {
  int result = 0;
  std::int64_t num_calls = 0;
  std::int64_t num_keys = 0;
};

int place_by_count(void* user_data, const recsdk_evict_columns* columns, double* places) {
  auto& placing = *static_cast<Placing*>(user_data);
  ++placing.num_calls;
  placing.num_keys += columns->num_keys;
  if (columns->times != nullptr || columns->scores == nullptr) return 3;
  for (std::int64_t i = 0; i < columns->num_keys; ++i)
    places[i] = static_cast<double>(columns->counts[i]) + static_cast<double>(columns->scores[i]);
  return placing.result;
}

TEST(CApiPoliciesTest, KeysLeaveByAFunction) {
  Placing placing;
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_FUNCTION);
  recsdk_table_config config = default_config(2);
  config.has_max_rows = 1;
  config.max_rows = 2;
  config.eviction = &rule;
  recsdk_table* none = nullptr;
  expect_invalid(recsdk_table_create(&config, &none), "pass both or none");
  rule.function = place_by_count;
  rule.function_data = &placing;
  rule.keeps_counts = 1;
  rule.keeps_scores = 1;
  rule.expire_every = 1;
  const TableHandle table = table_of(rule, 2);
  map(table.get(), {1, 1, 1, 2});
  map(table.get(), {1});
  EXPECT_EQ(placing.num_calls, 1);
  placing.result = 7;
  const std::int64_t key = 3;
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  EXPECT_EQ(recsdk_table_map_with(table.get(), &key, 1, nullptr, nullptr, &row, &outcome),
            RECSDK_ERROR_INTERNAL);
  EXPECT_NE(std::string(recsdk_last_error_message()).find("returned 7"), std::string::npos);
  EXPECT_TRUE(has(table.get(), 1) && has(table.get(), 2) && !has(table.get(), 3));
  placing.result = 0;
  map(table.get(), {3});
  EXPECT_TRUE(has(table.get(), 1) && !has(table.get(), 2) && has(table.get(), 3));
}

TEST(CApiPoliciesTest, AFunctionThatIgnoresNowIsShownWhoWasSeen) {
  for (const bool ignores_now : {false, true}) {
    Placing placing;
    recsdk_evict_config rule = evict_by(RECSDK_EVICT_FUNCTION);
    rule.function = place_by_count;
    rule.function_data = &placing;
    rule.keeps_counts = 1;
    rule.keeps_scores = 1;
    rule.expire_every = 1;
    rule.ignores_now = ignores_now ? 1 : 0;
    const TableHandle table = table_of(rule, 6);
    map(table.get(), {1, 2, 2, 3, 3, 3, 4, 4, 4, 4});  // no two are alike
    map(table.get(), {4, 4});
    EXPECT_EQ(placing.num_keys, 4);
    map(table.get(), {5, 5, 5, 5, 5});
    EXPECT_EQ(placing.num_keys, ignores_now ? 5 : 8);
    map(table.get(), {6, 7});
    EXPECT_EQ(placing.num_keys, ignores_now ? 6 : 13);
    EXPECT_TRUE(!(has(table.get(), 1) && has(table.get(), 2) && has(table.get(), 3)));
    EXPECT_TRUE(has(table.get(), 4) && has(table.get(), 5));
  }
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_LRU);
  rule.ignores_now = 1;
  recsdk_table_config config = default_config(2);
  config.has_max_rows = 1;
  config.max_rows = 2;
  config.eviction = &rule;
  recsdk_table* none = nullptr;
  expect_invalid(recsdk_table_create(&config, &none), "only kFunction has columns");
}

TEST(CApiPoliciesTest, APartOfTheKeysLeavesAtEachLook) {
  recsdk_evict_config rule = evict_by(RECSDK_EVICT_LFU);
  rule.share = 0.5;
  recsdk_table_config config = default_config(2);  // without max_rows
  config.eviction = &rule;
  const TableHandle table = make_table(config);
  map(table.get(), {1, 2, 2, 3, 3, 4, 5});
  map(table.get(), {6});
  std::int64_t count = 0;
  ASSERT_EQ(recsdk_table_expire(table.get(), 0, &count), RECSDK_OK);
  EXPECT_EQ(count, 3);
  EXPECT_TRUE(has(table.get(), 2) && has(table.get(), 3));
  rule.share = 1.5;
  recsdk_table* none = nullptr;
  expect_invalid(recsdk_table_create(&config, &none), "share must be above 0, up to 1, got 1.5");
}

TEST(CApiPoliciesTest, RoomIsMadeAheadByTableAndIndex) {
  const TableHandle table = table_of(evict_by(RECSDK_EVICT_LFU), 4);
  map(table.get(), {1, 2, 3, 4});
  std::int64_t count = 0;
  ASSERT_EQ(recsdk_table_evict(table.get(), 1, &count), RECSDK_OK);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(size_of(table.get()), 1);
  ASSERT_EQ(recsdk_table_evict(table.get(), 1, nullptr), RECSDK_OK);

  const recsdk_evict_config eviction = evict_by(RECSDK_EVICT_LRU, RECSDK_EVICT_BY_TIME);
  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  ASSERT_EQ(recsdk_index_config_init(&config), RECSDK_OK);
  config.max_rows = 2;
  config.has_max_rows = 1;
  config.eviction = &eviction;
  recsdk_index* index = nullptr;
  ASSERT_EQ(recsdk_index_create(&config, &index), RECSDK_OK) << recsdk_last_error_message();
  const Keys keys = {1, 2};
  const Keys times = {7, 6};
  recsdk_key_data data = {};
  data.times = times.data();
  data.num_times = 2;
  Keys rows(2);
  Bytes outcomes(2);
  expect_invalid(
      recsdk_index_map_with(index, keys.data(), 2, nullptr, nullptr, rows.data(), outcomes.data()),
      "eviction goes by time");
  ASSERT_EQ(
      recsdk_index_map_with(index, keys.data(), 2, nullptr, &data, rows.data(), outcomes.data()),
      RECSDK_OK);
  ASSERT_EQ(recsdk_index_set_time(index, 8), RECSDK_OK);
  ASSERT_EQ(recsdk_index_evict(index, 1, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  ASSERT_EQ(recsdk_index_map(index, keys.data(), 2, 0, nullptr, rows.data(), outcomes.data()),
            RECSDK_OK);
  EXPECT_EQ(outcomes, (Bytes{RECSDK_OUTCOME_FOUND, RECSDK_OUTCOME_MISSING}));
  recsdk_index_destroy(index);
}

TEST(CApiPoliciesTest, WhatLeavesIsReadWithItsRowAndCause) {
  TableHandle table = table_of(evict_by(RECSDK_EVICT_LRU), 2);
  map(table.get(), {1});
  map(table.get(), {2});
  const std::vector<float> gradient = {1.0F, -1.0F};
  const std::int64_t one = 1;
  ASSERT_EQ(recsdk_table_apply_gradients(table.get(), &one, 1, gradient.data(), nullptr),
            RECSDK_OK);
  std::vector<float> row(2);
  ASSERT_EQ(recsdk_table_lookup(table.get(), &one, 1, row.data(), nullptr), RECSDK_OK);
  const LeaversHandle leavers = leavers_of(table.get());
  recsdk_leavers* second = nullptr;
  expect_failure(recsdk_table_leavers(table.get(), nullptr, &second), RECSDK_ERROR_BUSY,
                 "somebody reads what leaves already");
  map(table.get(), {3});
  const std::int64_t two = 2;
  ASSERT_EQ(recsdk_table_erase(table.get(), &two, 1, nullptr), RECSDK_OK);
  table.reset();
  Keys keys(3);
  Bytes causes(3);
  std::vector<float> weights(6);
  std::int64_t count = 0;
  std::uint64_t lost = 1;
  ASSERT_EQ(recsdk_leavers_size(leavers.get(), &count, &lost), RECSDK_OK);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(lost, 0U);
  int has_rows = 0;
  ASSERT_EQ(recsdk_leavers_wait(leavers.get(), 60.0, &has_rows), RECSDK_OK);
  EXPECT_EQ(has_rows, 1);
  ASSERT_EQ(recsdk_leavers_read(leavers.get(), 3, keys.data(), causes.data(), weights.data(),
                                nullptr, &count),
            RECSDK_OK);
  ASSERT_EQ(count, 2);
  EXPECT_EQ(keys, (Keys{1, 2, 0}));
  EXPECT_EQ(causes, (Bytes{RECSDK_LEFT_EVICTED, RECSDK_LEFT_ERASED, 0}));
  EXPECT_EQ((std::vector<float>{weights[0], weights[1]}), row);
  ASSERT_EQ(recsdk_leavers_wait(leavers.get(), 60.0, &has_rows), RECSDK_OK);
  EXPECT_EQ(has_rows, 0);
}

TEST(CApiPoliciesTest, ACallThatWouldLoseSomeChangesNothing) {
  const TableHandle table = table_of(evict_by(RECSDK_EVICT_LRU), 3);
  map(table.get(), {1, 2, 3});
  recsdk_leavers_options options{};
  options.struct_size = sizeof(options);
  ASSERT_EQ(recsdk_leavers_options_init(&options), RECSDK_OK);
  EXPECT_EQ(options.max_rows, 65'536);
  options.max_rows = 1;
  options.on_overflow = RECSDK_OVERFLOW_RAISE;
  const LeaversHandle leavers = leavers_of(table.get(), &options);
  expect_failure(recsdk_table_clear(table.get()), RECSDK_ERROR_CAPACITY, "3 keys would leave");
  EXPECT_EQ(size_of(table.get()), 3);
  ASSERT_EQ(recsdk_leavers_close(leavers.get()), RECSDK_OK);
  ASSERT_EQ(recsdk_table_clear(table.get()), RECSDK_OK);
  options.on_overflow = 3;
  recsdk_leavers* other = nullptr;
  expect_invalid(recsdk_table_leavers(table.get(), &options, &other),
                 "recsdk_leavers_options.on_overflow");
  options.on_overflow = RECSDK_OVERFLOW_COUNT;
  options.max_rows = 0;
  expect_invalid(recsdk_table_leavers(table.get(), &options, &other),
                 "max_rows of leavers must be 1 or more, got 0");
}

struct DestroyIndex {
  void operator()(recsdk_index* index) const { recsdk_index_destroy(index); }
};
using IndexHandle = std::unique_ptr<recsdk_index, DestroyIndex>;

IndexHandle index_of(const recsdk_evict_config& eviction, std::int64_t max_rows) {
  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_index_config_init(&config), RECSDK_OK);
  config.name = "own";
  config.max_rows = max_rows;
  config.has_max_rows = 1;
  config.eviction_groups = 1;
  config.has_eviction_groups = 1;
  config.eviction = &eviction;
  recsdk_index* index = nullptr;
  EXPECT_EQ(recsdk_index_create(&config, &index), RECSDK_OK) << recsdk_last_error_message();
  return IndexHandle(index);
}

int map(recsdk_index* index, const Keys& keys) {
  Keys rows(keys.size());
  Bytes outcomes(keys.size());
  return recsdk_index_map(index, keys.data(), std::ssize(keys), 1, nullptr, rows.data(),
                          outcomes.data());
}

TEST(CApiPoliciesTest, WhatLeavesAnIndexIsTakenWithItsRowNumberAndFreed) {
  const recsdk_evict_config eviction = evict_by(RECSDK_EVICT_LRU);
  const IndexHandle index = index_of(eviction, 2);
  ASSERT_EQ(map(index.get(), {1}), RECSDK_OK);
  ASSERT_EQ(map(index.get(), {2}), RECSDK_OK);
  recsdk_leavers_options options{};
  options.struct_size = sizeof(options);
  ASSERT_EQ(recsdk_leavers_options_init(&options), RECSDK_OK);
  options.max_rows = 2;
  options.on_overflow = RECSDK_OVERFLOW_RAISE;
  recsdk_leavers* opened = nullptr;
  ASSERT_EQ(recsdk_index_leavers(index.get(), &options, &opened), RECSDK_OK)
      << recsdk_last_error_message();
  const LeaversHandle leavers(opened);
  ASSERT_EQ(map(index.get(), {3, 4}), RECSDK_OK) << recsdk_last_error_message();
  Keys keys(2);
  Keys rows(2);
  Bytes causes(2);
  std::int64_t count = 0;
  ASSERT_EQ(recsdk_leavers_take(leavers.get(), 2, keys.data(), causes.data(), rows.data(), &count),
            RECSDK_OK);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(keys, (Keys{1, 2}));
  EXPECT_EQ(rows, (Keys{0, 1}));
  EXPECT_EQ(causes, (Bytes{RECSDK_LEFT_EVICTED, RECSDK_LEFT_EVICTED}));
  std::uint64_t num_ended = 0;
  ASSERT_EQ(recsdk_leavers_num_ended(leavers.get(), &num_ended), RECSDK_OK);
  EXPECT_EQ(num_ended, 2U);
  expect_failure(map(index.get(), {5}), RECSDK_ERROR_CAPACITY,
                 "index 'own': 1 keys would leave, and the reader of leavers has room for 0");
  expect_invalid(recsdk_leavers_free_rows(leavers.get(), -1), "num_rows must be 0 or more, got -1");
  ASSERT_EQ(recsdk_leavers_free_rows(leavers.get(), 1), RECSDK_OK);
  ASSERT_EQ(map(index.get(), {5}), RECSDK_OK) << recsdk_last_error_message();
  std::int64_t row = -1;
  ASSERT_EQ(recsdk_leavers_take(leavers.get(), 1, keys.data(), nullptr, &row, &count), RECSDK_OK);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(row == 2 || row == 3);
  const std::int64_t too_many = std::int64_t{1} << 61;
  expect_invalid(
      recsdk_leavers_take(leavers.get(), too_many, keys.data(), nullptr, nullptr, &count),
      "be that of an array");
  expect_invalid(
      recsdk_leavers_read(leavers.get(), too_many, keys.data(), nullptr, nullptr, nullptr, &count),
      "be that of an array");
  expect_invalid(recsdk_leavers_take(leavers.get(), 0, keys.data(), nullptr, nullptr, &count),
                 "a capacity of 1 or more");
  expect_invalid(recsdk_index_leavers(nullptr, nullptr, &opened), "index");
}

// Who takes may wait for the call, so it waits for no place that is not taken.
TEST(CApiPoliciesTest, ACallOfAnIndexSaysWhatKeepsItsPlaces) {
  const recsdk_evict_config eviction = evict_by(RECSDK_EVICT_LRU);
  const IndexHandle index = index_of(eviction, 2);
  ASSERT_EQ(map(index.get(), {1, 2}), RECSDK_OK);
  recsdk_leavers_options options{};
  options.struct_size = sizeof(options);
  ASSERT_EQ(recsdk_leavers_options_init(&options), RECSDK_OK);
  options.max_rows = 2;
  options.on_overflow = RECSDK_OVERFLOW_BLOCK;
  recsdk_leavers* opened = nullptr;
  ASSERT_EQ(recsdk_index_leavers(index.get(), &options, &opened), RECSDK_OK);
  const LeaversHandle leavers(opened);
  ASSERT_EQ(map(index.get(), {3}), RECSDK_OK);
  expect_failure(map(index.get(), {4, 5}), RECSDK_ERROR_CAPACITY,
                 "1 places are of keys that nobody has taken yet: take and free them first");
  expect_failure(recsdk_index_clear(index.get()), RECSDK_ERROR_CAPACITY, "nobody has taken yet");
}

TEST(CApiPoliciesTest, ARuleThatMakesNoSenseIsRefused) {
  recsdk_evict_config eviction = evict_by(RECSDK_EVICT_SHOW_CLICK_TOTALS + 1);
  recsdk_table_config config = default_config(2);
  config.max_rows = 2;
  config.has_max_rows = 1;
  config.eviction = &eviction;
  recsdk_table* table = nullptr;
  expect_invalid(recsdk_table_create(&config, &table), "recsdk_evict_config.order");
  eviction.order = RECSDK_EVICT_LRU;
  eviction.has_half_life = 1;
  eviction.half_life = 2.0;
  expect_invalid(recsdk_table_create(&config, &table), "half_life");
  eviction.has_half_life = 0;
  config.has_max_rows = 0;
  expect_invalid(recsdk_table_create(&config, &table), "max_rows");
}

// ---- admission ---------------------------------------------------------------------------------

using Terms = std::vector<recsdk_admit_term>;

recsdk_admit_term count(std::int64_t n, std::int32_t kind = RECSDK_ADMIT_COUNT) {
  recsdk_admit_term term{};
  term.kind = kind;
  term.count = n;
  return term;
}

recsdk_admit_term chance(double probability) {
  recsdk_admit_term term{};
  term.kind = RECSDK_ADMIT_PROBABILITY;
  term.probability = probability;
  return term;
}

recsdk_admit_term clicks(double threshold) {
  recsdk_admit_term term{};
  term.kind = RECSDK_ADMIT_SHOW_CLICK;
  term.beta = 1.0;
  term.threshold = threshold;
  return term;
}

recsdk_admit_term join(std::int32_t kind) {
  recsdk_admit_term term{};
  term.kind = kind;
  return term;
}

recsdk_admit_config admit_by(const Terms& rule) {
  recsdk_admit_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_admit_config_init(&config), RECSDK_OK);
  config.rule = rule.data();
  config.num_terms = std::ssize(rule);
  return config;
}

TableHandle table_of(const recsdk_admit_config& admission) {
  recsdk_table_config config = default_config(2);
  config.admission = &admission;
  return make_table(config);
}

constexpr std::uint8_t kNot = RECSDK_OUTCOME_NOT_ADMITTED;
constexpr std::uint8_t kNew = RECSDK_OUTCOME_INSERTED;
constexpr std::uint8_t kFound = RECSDK_OUTCOME_FOUND;

TEST(CApiPoliciesTest, EachRuleOfAdmissionAndTheirJoins) {
  const recsdk_admit_term seldom = chance(1e-12);
  const recsdk_admit_term always = chance(1.0);
  const recsdk_admit_term both = join(RECSDK_ADMIT_ALL);
  const recsdk_admit_term either = join(RECSDK_ADMIT_ANY);
  const std::vector<std::pair<Terms, Bytes>> cases = {
      {{count(2)}, {kNot, kNew}},
      {{always}, {kNew, RECSDK_OUTCOME_FOUND}},
      {{count(2), seldom, both}, {kNot, kNot}},
      {{count(2), seldom, either}, {kNot, kNew}},
      {{count(3), always, both, count(2), either}, {kNot, kNew}},
  };
  for (const auto& [rule, expected] : cases) {
    const TableHandle table = table_of(admit_by(rule));
    Bytes found;
    for (std::size_t i = 0; i < expected.size(); ++i) found.push_back(map(table.get(), {7})[0]);
    EXPECT_EQ(found, expected);
  }
  recsdk_admit_config sketch = admit_by({});
  const Terms third = {count(3, RECSDK_ADMIT_COUNT_SKETCH)};
  sketch.rule = third.data();
  sketch.num_terms = 1;
  sketch.max_bytes = 1 << 20;
  sketch.has_max_bytes = 1;
  const TableHandle table = table_of(sketch);
  EXPECT_EQ(map(table.get(), {7, 7}), Bytes(2, kNot));
  EXPECT_EQ(map(table.get(), {7}), Bytes{kNew});
  EXPECT_EQ(stats_of(table.get()).outcomes[kNot], 2U);
}

TEST(CApiPoliciesTest, AdmissionTakesCountsAndClicks) {
  const Terms rule = {clicks(4.0)};
  recsdk_admit_config limited = admit_by(rule);
  limited.max_records = 64;
  limited.has_max_records = 1;
  const TableHandle table = table_of(limited);
  const std::int64_t twice = 2;
  const Keys of_each = {2, 1};
  recsdk_key_data data = {};
  data.counts = &twice;
  data.num_counts = 1;
  data.clicks = of_each.data();
  data.num_clicks = 2;
  EXPECT_EQ(map(table.get(), {1, 2}, &data), (Bytes{kNot, kNot}));  // beta alone: alpha is 0
  EXPECT_EQ(stats_of(table.get()).admission_records, 2);
  EXPECT_EQ(map(table.get(), {1, 2}, &data), (Bytes{kNew, kNot}));
  EXPECT_EQ(stats_of(table.get()).records_lost, 0U);

  Terms alone = {clicks(2.0)};
  alone[0].kind = RECSDK_ADMIT_SHOW_CLICK_OF_STEP;
  const TableHandle forgetting = table_of(admit_by(alone));
  for (int step = 0; step < 3; ++step)
    EXPECT_EQ(map(forgetting.get(), {1, 2}, &data), (Bytes{step > 0 ? kFound : kNew, kNot}));
  EXPECT_EQ(stats_of(forgetting.get()).admission_records, 0);

  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  ASSERT_EQ(recsdk_index_config_init(&config), RECSDK_OK);
  config.admission = &limited;
  recsdk_index* index = nullptr;
  ASSERT_EQ(recsdk_index_create(&config, &index), RECSDK_OK);
  std::int64_t row = 0;
  std::uint8_t outcome = 0;
  const std::int64_t key = 5;
  data.num_clicks = 1;
  ASSERT_EQ(recsdk_index_map_with(index, &key, 1, nullptr, &data, &row, &outcome), RECSDK_OK);
  EXPECT_EQ(outcome, kNot);
  recsdk_index_destroy(index);
  config.record_groups = 128;
  config.has_record_groups = 1;
  expect_invalid(recsdk_index_create(&config, &index), "128");
  config.record_groups = 64;
  ASSERT_EQ(recsdk_index_create(&config, &index), RECSDK_OK);
  recsdk_index_destroy(index);
  config.name = "";
  expect_invalid(recsdk_index_create(&config, &index), "index: name must not be empty, got ''");
}

// Files of rows, counts beside them, and the clock are what a table goes on from.
TEST(CApiPoliciesTest, CountsAndTheClockAreSavedAndRestored) {
  const Terms rule = {count(3)};
  const recsdk_admit_config admission = admit_by(rule);
  const TableHandle table = table_of(admission);
  map(table.get(), {1, 2});
  map(table.get(), {2});
  recsdk_cut* cut = nullptr;
  ASSERT_EQ(recsdk_table_cut(table.get(), nullptr, &cut), RECSDK_OK);
  recsdk_clock clock{};
  clock.struct_size = sizeof(clock);
  ASSERT_EQ(recsdk_cut_get_clock(cut, &clock), RECSDK_OK);
  EXPECT_EQ(std::tuple(clock.is_begun, clock.step, clock.has_time), std::tuple(1, 2, 0));
  const recsdk_admit_record* records = nullptr;
  std::int64_t num_records = 0;
  ASSERT_EQ(recsdk_cut_get_records(cut, &records, &num_records), RECSDK_OK);
  ASSERT_EQ(num_records, 2);
  EXPECT_EQ(std::tuple(records[1].key, records[1].count, records[1].step), std::tuple(2, 2, 2));

  const TableHandle other = table_of(admission);
  recsdk_restore* restore = nullptr;
  ASSERT_EQ(recsdk_restore_create(other.get(), &restore), RECSDK_OK);
  ASSERT_EQ(recsdk_restore_add_records(restore, records, num_records), RECSDK_OK);
  ASSERT_EQ(recsdk_restore_commit_at(restore, 0, 0.0, &clock), RECSDK_OK)
      << recsdk_last_error_message();
  recsdk_restore_destroy(restore);
  EXPECT_EQ(map(other.get(), {1, 2}), (Bytes{kNot, kNew}));

  const recsdk_admit_record twice[] = {records[0], records[0]};
  ASSERT_EQ(recsdk_restore_create(table.get(), &restore), RECSDK_OK);
  expect_invalid(recsdk_restore_add_records(restore, twice, 2), "comes twice");
  recsdk_restore_destroy(restore);
  recsdk_cut_destroy(cut);

  const TableHandle plain = make_table(default_config(2));
  ASSERT_EQ(recsdk_table_cut(plain.get(), nullptr, &cut), RECSDK_OK);
  expect_invalid(recsdk_cut_get_clock(cut, &clock), "with eviction or admission only");
  ASSERT_EQ(recsdk_cut_get_records(cut, &records, &num_records), RECSDK_OK);
  EXPECT_EQ(num_records, 0);
  recsdk_cut_destroy(cut);
}

TEST(CApiPoliciesTest, RulesOfAdmissionThatMakeNoSense) {
  const auto refused = [](const recsdk_admit_config& admission, const std::string& message) {
    recsdk_table_config config = default_config(2);
    config.admission = &admission;
    recsdk_table* table = nullptr;
    expect_invalid(recsdk_table_create(&config, &table), message);
  };
  refused(admit_by({}), "admission.rule must have 1 to 63 terms, got 0");
  Terms rule = {count(0)};
  refused(admit_by(rule), "admission.count must be 1 to 2147483647, got 0");
  rule = {count(2, 9)};
  refused(admit_by(rule), "recsdk_admit_term.kind");
  rule = {count(2, RECSDK_ADMIT_COUNT_SKETCH)};
  refused(admit_by(rule), "max_bytes is missing");
  rule = {count(2)};
  rule[0].reserved = 1;
  refused(admit_by(rule), "recsdk_admit_term.reserved");
  recsdk_admit_config none = admit_by({});
  none.num_terms = 1;
  refused(none, "recsdk_admit_config.rule");
}

}  // namespace
}  // namespace recsdk::test::c_api_policies_test
