// What keys without a row read through the C interface, and limits of norms: as C++ has them.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/c_api.h"
#include "recsdk/recsdk.h"

namespace recsdk::test::c_api_defaults_test {
namespace {

using Keys = std::vector<std::int64_t>;
using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

constexpr std::int64_t kDim = 3;

void expect_ok(int status) { EXPECT_EQ(status, RECSDK_OK) << recsdk_last_error_message(); }

recsdk_default_config defaults_of(std::int32_t kind) {
  recsdk_default_config config{};
  config.struct_size = sizeof(config);
  expect_ok(recsdk_default_config_init(&config));
  EXPECT_EQ(config.kind, RECSDK_DEFAULT_CONSTANT);
  EXPECT_EQ(config.value, 0.0F);
  EXPECT_EQ(config.num_rows, 1);
  EXPECT_EQ(config.begin_with, RECSDK_BEGIN_WITH_INITIAL_ROW);
  config.kind = kind;
  return config;
}

/// Equal tables of both interfaces with room for two keys and uniform initial rows.
struct Pair {
  explicit Pair(const recsdk_default_config* given, const DefaultConfig& wanted) {
    recsdk_initializer_config initializer = default_initializer();
    initializer.kind = RECSDK_INITIALIZER_UNIFORM;
    initializer.low = -1.0F;
    initializer.high = 1.0F;
    recsdk_table_config config = default_config(kDim);
    config.initializer = &initializer;
    config.max_rows = 2;
    config.has_max_rows = 1;
    config.default_row = given;
    of_c = make_table(config);

    TableConfig same;
    same.dim = kDim;
    same.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
    same.max_rows = 2;
    same.default_row = wanted;
    of_cpp = std::make_unique<Table>(same);
  }

  /// Both find or insert keys, train what they have, and look them up.
  void train_and_compare(const Keys& keys) const {
    const std::size_t size = keys.size() * kDim;
    Floats found(size), wanted(size);
    expect_ok(recsdk_table_find_or_insert(of_c.get(), keys.data(), std::ssize(keys), nullptr,
                                          found.data(), nullptr));
    of_cpp->find_or_insert(keys, wanted.data());
    EXPECT_EQ(found, wanted);
    const Floats gradients(size, 0.5F);
    expect_ok(recsdk_table_apply_gradients(of_c.get(), keys.data(), std::ssize(keys),
                                           gradients.data(), nullptr));
    of_cpp->apply_gradients(keys, gradients.data());
    Bytes outcomes(keys.size());
    expect_ok(recsdk_table_lookup(of_c.get(), keys.data(), std::ssize(keys), found.data(),
                                  outcomes.data()));
    std::vector<Outcome> same(keys.size());
    of_cpp->lookup(keys, wanted.data(), same);
    EXPECT_EQ(found, wanted);
    for (std::size_t i = 0; i < keys.size(); ++i)
      EXPECT_EQ(outcomes[i], static_cast<std::uint8_t>(same[i]));
  }

  TableHandle of_c;
  std::unique_ptr<Table> of_cpp;
};

TEST(CApiDefaultsTest, KeysWithoutARowReadWhatTheyReadInCpp) {
  const Keys keys = {7, 8, 9, 10, 7, 9};
  Pair(nullptr, {}).train_and_compare(keys);
  recsdk_default_config constant = defaults_of(RECSDK_DEFAULT_CONSTANT);
  constant.value = 2.5F;
  Pair(&constant, {.value = 2.5F}).train_and_compare(keys);
  const recsdk_default_config initial = defaults_of(RECSDK_DEFAULT_INITIAL_ROW);
  Pair(&initial, {.kind = DefaultKind::kInitialRow}).train_and_compare(keys);
  recsdk_default_config shared = defaults_of(RECSDK_DEFAULT_SHARED_ROWS);
  shared.num_rows = 2;
  for (const std::int32_t begin : {RECSDK_BEGIN_WITH_INITIAL_ROW, RECSDK_BEGIN_WITH_SHARED_ROW}) {
    shared.begin_with = begin;
    const Pair pair(&shared, {.kind = DefaultKind::kSharedRows,
                              .num_rows = 2,
                              .begin_with = static_cast<BeginWith>(begin)});
    pair.train_and_compare({9});
    pair.train_and_compare(keys);
  }
}

TEST(CApiDefaultsTest, WhatIsNoDefaultIsRefused) {
  const auto refused = [](const recsdk_default_config& given, const std::string& text) {
    recsdk_table_config config = default_config(kDim);
    config.default_row = &given;
    recsdk_table* table = nullptr;
    expect_invalid(recsdk_table_create(&config, &table), text);
    EXPECT_EQ(table, nullptr);
  };
  refused(defaults_of(3), "recsdk_default_config.kind");
  recsdk_default_config given = defaults_of(RECSDK_DEFAULT_SHARED_ROWS);
  given.num_rows = 0;
  refused(given, "default_row");
  given = defaults_of(RECSDK_DEFAULT_SHARED_ROWS);
  given.begin_with = 2;
  refused(given, "recsdk_default_config.begin_with");
  given = defaults_of(RECSDK_DEFAULT_CONSTANT);
  given.value = std::numeric_limits<float>::infinity();
  refused(given, "default_row.value must be finite");
  given = defaults_of(RECSDK_DEFAULT_CONSTANT);
  given.reserved = 1;
  refused(given, "recsdk_default_config.reserved");
}

TEST(CApiDefaultsTest, AnIndexSaysWhichSharedRowAKeyReads) {
  recsdk_default_config shared = defaults_of(RECSDK_DEFAULT_SHARED_ROWS);
  shared.num_rows = 5;
  recsdk_index_config config{};
  config.struct_size = sizeof(config);
  expect_ok(recsdk_index_config_init(&config));
  config.default_row = &shared;
  recsdk_index* index = nullptr;
  ASSERT_EQ(recsdk_index_create(&config, &index), RECSDK_OK) << recsdk_last_error_message();
  const Keys keys = {1, -5, 1'000'000'007};
  Keys rows(3);
  Bytes outcomes(3);
  expect_ok(recsdk_index_map(index, keys.data(), 3, 0, nullptr, rows.data(), outcomes.data()));
  recsdk_index_destroy(index);
  EXPECT_EQ(outcomes, Bytes(3, RECSDK_OUTCOME_MISSING));
  for (std::size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(rows[i], shared_row(keys[i], 5));
}

TEST(CApiDefaultsTest, SharedRowsAreSavedBesideFilesAndRestored) {
  recsdk_default_config shared = defaults_of(RECSDK_DEFAULT_SHARED_ROWS);
  shared.num_rows = 2;
  const Pair pair(&shared, {.kind = DefaultKind::kSharedRows, .num_rows = 2});
  pair.train_and_compare({1, 2, 3, 4, 5});
  recsdk_cut* cut = nullptr;
  ASSERT_EQ(recsdk_table_cut(pair.of_c.get(), nullptr, &cut), RECSDK_OK);
  recsdk_shared_rows rows{};
  rows.struct_size = sizeof(rows);
  expect_ok(recsdk_cut_get_shared(cut, &rows));
  const SharedRows wanted = pair.of_cpp->shared_rows();
  ASSERT_EQ(rows.num_rows, 2);
  EXPECT_EQ(Keys(rows.keys, rows.keys + 2), wanted.keys);
  EXPECT_EQ(Floats(rows.weights, rows.weights + 2 * kDim), wanted.weights);

  const Pair fresh(&shared, {.kind = DefaultKind::kSharedRows, .num_rows = 2});
  recsdk_restore* restore = nullptr;
  ASSERT_EQ(recsdk_restore_create(fresh.of_c.get(), &restore), RECSDK_OK);
  expect_ok(recsdk_restore_add_shared(restore, rows.keys, 2, rows.weights, nullptr));
  expect_invalid(recsdk_restore_add_shared(restore, rows.keys, 2, nullptr, nullptr), "weights");
  expect_ok(recsdk_restore_commit(restore, 1, 0.0));
  recsdk_restore_destroy(restore);
  Floats read(kDim);
  expect_ok(recsdk_table_lookup(fresh.of_c.get(), rows.keys, 1, read.data(), nullptr));
  EXPECT_EQ(read, Floats(rows.weights, rows.weights + kDim));
  recsdk_cut_destroy(cut);

  const TableHandle plain = make_table(default_config(kDim));
  ASSERT_EQ(recsdk_table_cut(plain.get(), nullptr, &cut), RECSDK_OK);
  expect_ok(recsdk_cut_get_shared(cut, &rows));
  EXPECT_EQ(rows.num_rows, 0);
  recsdk_cut_destroy(cut);
}

TEST(CApiDefaultsTest, NormsAreLimitedAsInCpp) {
  const Pair pair(nullptr, {});
  pair.train_and_compare({1, 2});
  const Keys keys = {1, 2, 3, 1};
  Keys rows(4), same_rows(4);
  Bytes outcomes(4);
  std::vector<Outcome> same_outcomes(4);
  expect_ok(
      recsdk_table_map(pair.of_c.get(), keys.data(), 4, 0, nullptr, rows.data(), outcomes.data()));
  pair.of_cpp->map(keys, same_rows, same_outcomes, {.insert = false});
  const NormLimit limit{.max_norm = 0.25, .norm_type = 1.0};
  Floats factors(4), wanted(4);
  expect_ok(recsdk_table_norm_factors(pair.of_c.get(), rows.data(), outcomes.data(), 4, 0.25, 1.0,
                                      factors.data()));
  pair.of_cpp->norm_factors(same_rows, same_outcomes, limit, wanted.data());
  EXPECT_EQ(factors, wanted);
  EXPECT_LT(factors[0], 1.0F);
  std::int64_t num_limited = -1;
  expect_ok(recsdk_table_limit_norms(pair.of_c.get(), rows.data(), outcomes.data(), 4, 0.25, 1.0,
                                     &num_limited));
  EXPECT_EQ(num_limited, pair.of_cpp->limit_norms(same_rows, same_outcomes, limit));
  EXPECT_EQ(num_limited, 2);
  pair.train_and_compare({1, 2});
  expect_invalid(recsdk_table_limit_norms(pair.of_c.get(), rows.data(), outcomes.data(), 4, -1.0,
                                          2.0, nullptr),
                 "max_norm");
}

}  // namespace
}  // namespace recsdk::test::c_api_defaults_test
