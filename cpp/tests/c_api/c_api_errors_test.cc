// Every error path of the C interface: the code, the message, and that nothing has changed.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "c_api/status.h"
#include "c_api_handles.h"
#include "recsdk/c_api.h"

namespace recsdk::test::c_api_errors_test {
namespace {

class CApiErrorsTest : public testing::Test {
 protected:
  TableHandle owner_ = make_table(default_config(2));
  recsdk_table* table_ = owner_.get();
  std::array<std::int64_t, 2> keys_{1, 2};
  std::array<std::int64_t, 2> rows_{};
  std::array<std::uint8_t, 2> outcomes_{};
  std::array<float, 4> values_{};
};

TEST(CApiStatusTest, EveryExceptionBecomesItsCode) {
  const auto status_of = [](const auto& exception) {
    return c_api::guarded([&] { throw exception; });
  };
  expect_failure(status_of(Error(ErrorCode::kCapacity, "too many")), RECSDK_ERROR_CAPACITY,
                 "too many");
  expect_failure(status_of(Error(ErrorCode::kNonFinite, "nan")), RECSDK_ERROR_NON_FINITE, "nan");
  expect_invalid(status_of(std::invalid_argument("bad dim")), "bad dim");
  expect_failure(status_of(std::bad_alloc()), RECSDK_ERROR_OUT_OF_MEMORY, "out of memory");
  expect_failure(status_of(std::logic_error("a bug")), RECSDK_ERROR_INTERNAL, "a bug");
  expect_failure(status_of(42), RECSDK_ERROR_INTERNAL, "not a std::exception");
}

TEST(CApiStatusTest, SuccessKeepsTheMessage) {
  EXPECT_EQ(c_api::guarded([] { throw std::invalid_argument("kept"); }),
            RECSDK_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(c_api::guarded([] {}), RECSDK_OK);
  EXPECT_STREQ(recsdk_last_error_message(), "kept");
}

TEST(CApiStatusTest, MessagesBelongToTheirThread) {
  expect_invalid(recsdk_set_num_threads(0), "0");
  const std::string mine = recsdk_last_error_message();
  std::string others_before;
  std::thread([&] {
    others_before = recsdk_last_error_message();
    expect_invalid(recsdk_isa(nullptr), "name");
  }).join();
  EXPECT_EQ(others_before, "");
  EXPECT_EQ(recsdk_last_error_message(), mine);
}

TEST(CApiStatusTest, LongMessagesAreCutBetweenCharacters) {
  const std::string kilobyte(1020, 'x');
  EXPECT_EQ(c_api::guarded([&] { throw std::invalid_argument(kilobyte + "abcdef"); }), 1);
  EXPECT_EQ(recsdk_last_error_message(), kilobyte + "abc");
  // A character of three bytes of which the last would not fit.
  EXPECT_EQ(c_api::guarded([&] { throw std::invalid_argument(kilobyte + "a\xe2\x82\xac"); }), 1);
  EXPECT_EQ(recsdk_last_error_message(), kilobyte + "a");
}

TEST(CApiRuntimeErrorsTest, SaysWhatIsWrong) {
  const char* const* names = nullptr;
  std::int64_t count = 0;
  std::uint64_t hash = 0;
  expect_invalid(recsdk_available_isas(nullptr, &count), "names must not be null");
  expect_invalid(recsdk_available_isas(&names, nullptr), "num_names must not be null");
  expect_invalid(recsdk_isa(nullptr), "name must not be null");
  expect_invalid(recsdk_set_isa(nullptr), "name must not be null");
  expect_invalid(recsdk_set_isa("abacus"), "abacus");
  expect_invalid(recsdk_num_threads(nullptr), "count must not be null");
  expect_invalid(recsdk_set_num_threads(-1), "-1");
  expect_invalid(recsdk_table_hash(nullptr, &hash), "name must not be null");
  expect_invalid(recsdk_table_hash("a", nullptr), "hash must not be null");
}

TEST(CApiConfigErrorsTest, StructSizesAreChecked) {
  recsdk_table_config table{};
  recsdk_optimizer_config optimizer{};
  recsdk_initializer_config initializer{};
  expect_invalid(recsdk_table_config_init(nullptr), "recsdk_table_config must not be null");
  expect_invalid(recsdk_table_config_init(&table), ", got 0");
  expect_invalid(recsdk_optimizer_config_init(&optimizer, 0), ", got 0");
  expect_invalid(recsdk_initializer_config_init(&initializer), ", got 0");
  initializer.struct_size = sizeof(initializer) + 8;
  expect_invalid(recsdk_initializer_config_init(&initializer), "at least as new");

  optimizer.struct_size = sizeof(optimizer);
  expect_invalid(recsdk_optimizer_config_init(&optimizer, 8), "kind must be 0 to 7, got 8");
  expect_invalid(recsdk_optimizer_config_init(&optimizer, -1), "kind must be 0 to 7, got -1");
}

// What creating a table says after `spoil` has changed a good config.
template <typename Spoil>
void expect_bad_config(const std::string& text, Spoil spoil) {
  recsdk_optimizer_config optimizer = default_optimizer(RECSDK_OPTIMIZER_ADAM);
  recsdk_initializer_config initializer = default_initializer();
  recsdk_table_config config = default_config(2);
  config.optimizer = &optimizer;
  config.initializer = &initializer;
  spoil(config, optimizer, initializer);
  recsdk_table* table = nullptr;
  expect_invalid(recsdk_table_create(&config, &table), text);
  EXPECT_EQ(table, nullptr);
}

TEST(CApiConfigErrorsTest, BadFieldsAreNamed) {
  using T = recsdk_table_config&;
  using O = recsdk_optimizer_config&;
  using I = recsdk_initializer_config&;
  expect_bad_config("struct_size", [](T t, O, I) { t.struct_size = 8; });
  expect_bad_config("recsdk_optimizer_config.struct_size", [](T, O o, I) { o.struct_size = 8; });
  expect_bad_config("recsdk_initializer_config.struct_size", [](T, O, I i) { i.struct_size = 8; });
  expect_bad_config("dim", [](T t, O, I) { t.dim = 0; });
  expect_bad_config("dim", [](T t, O, I) { t.dim = -5; });
  expect_bad_config("name must not be null", [](T t, O, I) { t.name = nullptr; });
  expect_bad_config("table: name must not be empty, got ''", [](T t, O, I) { t.name = ""; });
  expect_bad_config("max_rows", [](T t, O, I) { t.has_max_rows = 1, t.max_rows = -1; });
  expect_bad_config("eviction_groups must be a power of two up to max_rows and 65536, got 3",
                    [](T t, O, I) {
                      t.has_max_rows = t.has_eviction_groups = 1;
                      t.max_rows = 9, t.eviction_groups = 3;
                    });
  expect_bad_config(", got [1, 0)", [](T t, O, I) {
    t.has_max_rows = t.has_owned_groups = 1;
    t.max_rows = 9, t.owned_begin = 1, t.owned_end = 0;
  });
  expect_bad_config("num_threads", [](T t, O, I) { t.has_num_threads = 1, t.num_threads = 0; });
  expect_bad_config("weight_dtype must be 0 to 2, got 3", [](T t, O, I) { t.weight_dtype = 3; });
  expect_bad_config("rounding must be 0 to 1, got 2", [](T t, O, I) { t.rounding = 2; });
  expect_bad_config("on_full must be 0 to 1, got 2", [](T t, O, I) { t.on_full = 2; });
  expect_bad_config("on_nonfinite", [](T t, O, I) { t.on_nonfinite = 3; });
  expect_bad_config("kind must be 0 to 7, got 9", [](T, O o, I) { o.kind = 9; });
  expect_bad_config("bias_correction must be 0 to 1, got 2",
                    [](T, O o, I) { o.bias_correction = 2; });
  expect_bad_config("weight_decay_mode must be 0 to 1, got 2",
                    [](T, O o, I) { o.weight_decay_mode = 2; });
  expect_bad_config("catch_up must be false, got true", [](T, O o, I) { o.catch_up = 1; });
  expect_bad_config("nesterov must be 0, got 1", [](T, O o, I) { o.nesterov = 1; });
  expect_bad_config("centered must be 0, got 1", [](T, O o, I) { o.centered = 1; });
  expect_bad_config("momentum must be 0, got 0.5", [](T, O o, I) { o.momentum = 0.5F; });
  expect_bad_config("dampening must be 0, got 0.5", [](T, O o, I) { o.dampening = 0.5; });
  expect_bad_config("alpha must be at least 0 and below 1, got 1",
                    [](T, O o, I) { o.alpha = 1.0; });
  expect_bad_config("l1 must be 0, got 2", [](T, O o, I) { o.l1 = 2.0F; });
  expect_bad_config("l2 must be 0, got 3", [](T, O o, I) { o.l2 = 3.0F; });
  expect_bad_config("beta must be 0, got 4", [](T, O o, I) { o.beta = 4.0F; });
  expect_bad_config("clip_value must be finite and above 0, got 0",
                    [](T, O o, I) { o.has_clip_value = 1; });
  expect_bad_config("clip_norm must be finite and above 0, got 0",
                    [](T, O o, I) { o.has_clip_norm = 1; });
  expect_bad_config("reserved", [](T, O o, I) { o.reserved = 1; });
  expect_bad_config("learning_rate", [](T, O o, I) { o.learning_rate = -1.0F; });
  expect_bad_config("beta1", [](T, O o, I) { o.beta1 = 1.0; });
  expect_bad_config("kind must be 0 to 4, got 5", [](T, O, I i) { i.kind = 5; });
  expect_bad_config("callback must not be null",
                    [](T, O, I i) { i.kind = RECSDK_INITIALIZER_CUSTOM; });
  expect_bad_config("low", [](T, O, I i) { i.kind = RECSDK_INITIALIZER_UNIFORM, i.low = 1.0F; });
}

TEST(CApiConfigErrorsTest, CreateNeedsBothPointers) {
  const recsdk_table_config config = default_config(1);
  recsdk_table* table = nullptr;
  expect_invalid(recsdk_table_create(nullptr, &table), "recsdk_table_config must not be null");
  expect_invalid(recsdk_table_create(&config, nullptr), "table must not be null");
}

TEST(CApiConfigErrorsTest, FreeingNothingIsFine) {
  recsdk_table_destroy(nullptr);
  recsdk_lease_release(nullptr);
}

TEST_F(CApiErrorsTest, NullTables) {
  std::int64_t number = 0;
  std::uint64_t count = 0;
  float rate = 0.0F;
  recsdk_lease* lease = nullptr;
  recsdk_stats stats{};
  recsdk_row_layout layout{};
  recsdk_row_field field{};
  const std::string message = "table must not be null";
  expect_invalid(
      recsdk_table_map(nullptr, keys_.data(), 2, 1, nullptr, rows_.data(), outcomes_.data()),
      message);
  expect_invalid(recsdk_table_lookup(nullptr, keys_.data(), 2, values_.data(), nullptr), message);
  expect_invalid(
      recsdk_table_find_or_insert(nullptr, keys_.data(), 2, nullptr, values_.data(), nullptr),
      message);
  expect_invalid(recsdk_table_upsert(nullptr, keys_.data(), 2, values_.data(), nullptr, nullptr),
                 message);
  expect_invalid(recsdk_table_erase(nullptr, keys_.data(), 2, nullptr), message);
  expect_invalid(recsdk_table_clear(nullptr), message);
  expect_invalid(recsdk_table_apply_gradients(nullptr, keys_.data(), 2, values_.data(), nullptr),
                 message);
  expect_invalid(recsdk_table_pool(nullptr, nullptr, 0), message);
  expect_invalid(recsdk_table_update(nullptr, nullptr, 0), message);
  expect_invalid(recsdk_table_lease(nullptr, 0, 0, &lease), message);
  expect_invalid(recsdk_table_learning_rate(nullptr, &rate), message);
  expect_invalid(recsdk_table_set_learning_rate(nullptr, 1.0F), message);
  expect_invalid(recsdk_table_update_count(nullptr, &count), message);
  expect_invalid(recsdk_table_set_update_count(nullptr, 1), message);
  expect_invalid(recsdk_table_log_decay(nullptr, nullptr), message);
  expect_invalid(recsdk_table_set_log_decay(nullptr, 0.0), message);
  expect_invalid(recsdk_table_size(nullptr, &number), message);
  expect_invalid(recsdk_table_memory_bytes(nullptr, &number), message);
  expect_invalid(recsdk_table_reserve(nullptr, 1), message);
  expect_invalid(recsdk_table_check_invariants(nullptr), message);
  expect_invalid(
      recsdk_table_export_rows(nullptr, &number, 2, rows_.data(), nullptr, nullptr, &number),
      message);
  stats.struct_size = sizeof(stats);
  layout.struct_size = sizeof(layout);
  field.struct_size = sizeof(field);
  expect_invalid(recsdk_table_stats(nullptr, &stats), message);
  expect_invalid(recsdk_table_layout(nullptr, &layout), message);
  expect_invalid(recsdk_table_field(nullptr, 0, &field), message);
}

TEST_F(CApiErrorsTest, NullResults) {
  std::int64_t number = 0;
  int flag = 0;
  const LeaseHandle lease = take_lease(table_, 0, 0);
  expect_invalid(recsdk_table_lease(table_, 0, 0, nullptr), "lease must not be null");
  expect_invalid(recsdk_lease_step(nullptr, &flag, &number), "lease must not be null");
  expect_invalid(recsdk_lease_step(lease.get(), nullptr, &number), "has_step must not be null");
  expect_invalid(recsdk_lease_step(lease.get(), &flag, nullptr), "step must not be null");
  expect_invalid(recsdk_table_learning_rate(table_, nullptr), "learning_rate must not be null");
  expect_invalid(recsdk_table_update_count(table_, nullptr), "count must not be null");
  expect_invalid(recsdk_table_log_decay(table_, nullptr), "log_decay must not be null");
  expect_invalid(recsdk_table_set_log_decay(table_, -1.0),
                 "log_decay must be 0 without catch_up, got -1");
  expect_invalid(recsdk_table_size(table_, nullptr), "size must not be null");
  expect_invalid(recsdk_table_memory_bytes(table_, nullptr), "bytes must not be null");
  expect_invalid(recsdk_table_stats(table_, nullptr), "recsdk_stats must not be null");
  expect_invalid(recsdk_table_layout(table_, nullptr), "recsdk_row_layout must not be null");
  expect_invalid(recsdk_table_field(table_, 0, nullptr), "recsdk_row_field must not be null");
  expect_invalid(
      recsdk_table_export_rows(table_, nullptr, 2, rows_.data(), nullptr, nullptr, &number),
      "begin must not be null");
  expect_invalid(recsdk_table_export_rows(table_, &number, 2, nullptr, nullptr, nullptr, &number),
                 "keys must not be null");
  expect_invalid(
      recsdk_table_export_rows(table_, &number, 2, rows_.data(), nullptr, nullptr, nullptr),
      "num_rows must not be null");
}

TEST_F(CApiErrorsTest, ResultStructsNeedTheirSize) {
  recsdk_stats stats{};
  recsdk_row_layout layout{};
  recsdk_row_field field{};
  expect_invalid(recsdk_table_stats(table_, &stats), ", got 0");
  expect_invalid(recsdk_table_layout(table_, &layout), ", got 0");
  expect_invalid(recsdk_table_field(table_, 0, &field), ", got 0");
  field.struct_size = sizeof(field);
  expect_invalid(recsdk_table_field(table_, 1, &field), ", got 1");
  expect_invalid(recsdk_table_field(table_, -1, &field), ", got -1");
}

TEST_F(CApiErrorsTest, NullArrays) {
  expect_invalid(recsdk_table_map(table_, nullptr, 2, 1, nullptr, rows_.data(), outcomes_.data()),
                 "keys must not be null");
  expect_invalid(recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, nullptr, outcomes_.data()),
                 "rows must not be null");
  expect_invalid(recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, rows_.data(), nullptr),
                 "outcomes must not be null");
  expect_invalid(recsdk_table_lookup(table_, nullptr, 2, values_.data(), nullptr),
                 "keys must not be null");
  expect_invalid(recsdk_table_lookup(table_, keys_.data(), 2, nullptr, nullptr),
                 "values must not be null");
  expect_invalid(recsdk_table_find_or_insert(table_, keys_.data(), 2, nullptr, nullptr, nullptr),
                 "values must not be null");
  expect_invalid(recsdk_table_upsert(table_, keys_.data(), 2, nullptr, nullptr, nullptr),
                 "values must not be null");
  expect_invalid(recsdk_table_erase(table_, nullptr, 2, nullptr), "keys must not be null");
  expect_invalid(recsdk_table_apply_gradients(table_, keys_.data(), 2, nullptr, nullptr),
                 "gradients must not be null");
  expect_invalid(recsdk_table_pool(table_, nullptr, 1), "blocks must not be null");
  expect_invalid(recsdk_table_update(table_, nullptr, 1), "blocks must not be null");
  EXPECT_EQ(size_of(table_), 0);
}

TEST_F(CApiErrorsTest, NegativeCounts) {
  std::int64_t begin = 0;
  std::int64_t number = 0;
  const std::string message = "must not be negative, got -1";
  expect_invalid(
      recsdk_table_map(table_, keys_.data(), -1, 1, nullptr, rows_.data(), outcomes_.data()),
      message);
  expect_invalid(recsdk_table_lookup(table_, keys_.data(), -1, values_.data(), nullptr), message);
  expect_invalid(
      recsdk_table_find_or_insert(table_, keys_.data(), -1, nullptr, values_.data(), nullptr),
      message);
  expect_invalid(recsdk_table_upsert(table_, keys_.data(), -1, values_.data(), nullptr, nullptr),
                 message);
  expect_invalid(recsdk_table_erase(table_, keys_.data(), -1, nullptr), message);
  expect_invalid(recsdk_table_apply_gradients(table_, keys_.data(), -1, values_.data(), nullptr),
                 message);
  expect_invalid(recsdk_table_pool(table_, nullptr, -1), message);
  expect_invalid(recsdk_table_update(table_, nullptr, -1), message);
  expect_invalid(recsdk_map_tables(nullptr, -1), message);
  expect_invalid(recsdk_pool_tables(nullptr, -1), message);
  expect_invalid(recsdk_update_tables(nullptr, -1), message);
  expect_invalid(
      recsdk_table_export_rows(table_, &begin, -1, rows_.data(), nullptr, nullptr, &number),
      message);
  expect_invalid(
      recsdk_table_export_rows(table_, &begin, 0, rows_.data(), nullptr, nullptr, &number),
      "capacity");
  expect_invalid(recsdk_table_reserve(table_, -1), "-1");
}

TEST_F(CApiErrorsTest, CountsThatNoArrayHas) {
  const std::int64_t bound = std::numeric_limits<std::int64_t>::max() / 8;
  for (const std::int64_t count : {bound + 1, std::numeric_limits<std::int64_t>::max()}) {
    const std::string message = "must be that of an array, at most " + std::to_string(bound) +
                                ", got " + std::to_string(count);
    expect_invalid(
        recsdk_table_map(table_, keys_.data(), count, 1, nullptr, rows_.data(), outcomes_.data()),
        message);
    expect_invalid(recsdk_table_lookup(table_, keys_.data(), count, values_.data(), nullptr),
                   "must be that of an array");
    expect_invalid(recsdk_table_erase(table_, keys_.data(), count, nullptr), message);
    const recsdk_bags bags = {rows_.data(), outcomes_.data(),   0, rows_.data(), count,
                              nullptr,      RECSDK_POOLING_SUM, 0};
    const recsdk_pool_block block = {bags, values_.data(), 2};
    expect_invalid(recsdk_table_pool(table_, &block, 1), message);
  }
  EXPECT_EQ(size_of(table_), 0);
}

// Written keys would be inserted in place of those that came.
TEST_F(CApiErrorsTest, WhatACallWritesLiesOverNothingElse) {
  std::array<std::int64_t, 3> numbers = {7, 8, 9};
  std::array<std::uint8_t, 24> bytes{};
  auto* const outcomes_over_keys = reinterpret_cast<std::uint8_t*>(numbers.data());
  const std::string message = "lie over its ";
  for (const int insert : {0, 1}) {
    for (const int shift : {0, 1}) {
      expect_invalid(recsdk_table_map(table_, numbers.data(), 2, insert, nullptr,
                                      numbers.data() + shift, bytes.data()),
                     message);
    }
    expect_invalid(recsdk_table_map(table_, numbers.data(), 2, insert, nullptr, rows_.data(),
                                    reinterpret_cast<std::uint8_t*>(rows_.data()) + 15),
                   message);
    const recsdk_map_call call = {table_,         numbers.data(), 2,      nullptr,
                                  numbers.data(), bytes.data(),   insert, 0};
    expect_invalid(recsdk_map_tables(&call, 1), message);
  }
  expect_invalid(recsdk_table_find_or_insert(table_, numbers.data(), 2, nullptr, values_.data(),
                                             outcomes_over_keys + 15),
                 message);
  expect_invalid(
      recsdk_table_upsert(table_, numbers.data(), 2, values_.data(), nullptr, outcomes_over_keys),
      message);
  expect_invalid(recsdk_table_erase(table_, numbers.data(), 2, outcomes_over_keys), message);
  EXPECT_EQ(size_of(table_), 0);
  EXPECT_EQ(numbers, (std::array<std::int64_t, 3>{7, 8, 9}));
  EXPECT_EQ(recsdk_table_map(table_, numbers.data(), 2, 1, nullptr, rows_.data(),
                             outcomes_over_keys + 16),
            RECSDK_OK);
  EXPECT_EQ(size_of(table_), 2);
}

// Outcomes are written before values are read, and bags are read while vectors are written.
TEST_F(CApiErrorsTest, OutcomesLieOverNoValues) {
  auto* const over = reinterpret_cast<std::uint8_t*>(values_.data());
  const std::vector<float> before(values_.begin(), values_.end());
  expect_invalid(recsdk_table_lookup(table_, keys_.data(), 2, values_.data(), over + 15),
                 "outcomes lie over its values");
  expect_invalid(
      recsdk_table_find_or_insert(table_, keys_.data(), 2, nullptr, values_.data(), over),
      "outcomes lie over its values");
  expect_invalid(recsdk_table_upsert(table_, keys_.data(), 2, values_.data(), nullptr, over),
                 "outcomes lie over its values");
  expect_invalid(recsdk_table_apply_gradients(table_, keys_.data(), 2, values_.data(), over),
                 "outcomes lie over its gradients");
  EXPECT_EQ(std::vector<float>(values_.begin(), values_.end()), before);
  EXPECT_EQ(size_of(table_), 0);
}

TEST_F(CApiErrorsTest, ValuesLieOverNoKeys) {
  auto* const over = reinterpret_cast<float*>(keys_.data());
  const std::vector<std::int64_t> before(keys_.begin(), keys_.end());
  expect_invalid(recsdk_table_lookup(table_, keys_.data(), 2, over + 3, outcomes_.data()),
                 "values lie over its keys");
  expect_invalid(
      recsdk_table_find_or_insert(table_, keys_.data(), 2, nullptr, over, outcomes_.data()),
      "values lie over its keys");
  EXPECT_EQ(std::vector<std::int64_t>(keys_.begin(), keys_.end()), before);
  EXPECT_EQ(size_of(table_), 0);
}

TEST_F(CApiErrorsTest, WhatIsWrittenForBagsLiesOverNoneOfTheirArrays) {
  ASSERT_EQ(recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, rows_.data(), outcomes_.data()),
            RECSDK_OK);
  std::array<float, 8> numbers{};
  std::array<std::int64_t, 3> offsets = {0, 1, 2};
  const recsdk_bags bags = {rows_.data(),   outcomes_.data(),   2, offsets.data(), 2,
                            numbers.data(), RECSDK_POOLING_SUM, 0};
  const auto pool = [&](void* out, std::int64_t stride) {
    const recsdk_pool_block block = {bags, static_cast<float*>(out), stride};
    return recsdk_table_pool(table_, &block, 1);
  };
  expect_invalid(pool(rows_.data(), 2), "vectors lie over its rows");
  expect_invalid(pool(offsets.data(), 2), "vectors lie over its offsets");
  expect_invalid(pool(numbers.data() + 1, 2), "vectors lie over its weights");
  EXPECT_EQ(pool(numbers.data() + 2, 2), RECSDK_OK);
  // Weights that lie between vectors are their own place.
  recsdk_pool_block apart = {bags, numbers.data(), 4};
  apart.bags.weights = numbers.data() + 2;
  EXPECT_EQ(recsdk_table_pool(table_, &apart, 1), RECSDK_OK);
  apart.bags.weights = numbers.data() + 3;
  expect_invalid(recsdk_table_pool(table_, &apart, 1), "vectors lie over its weights");
  const auto update = [&](float* weights_grad, std::int64_t stride) {
    const recsdk_grad_block block = {bags, numbers.data() + 2, stride, weights_grad};
    return recsdk_table_update(table_, &block, 1);
  };
  expect_invalid(update(numbers.data(), 2), "gradients of weights lie over its weights");
  expect_invalid(update(numbers.data() + 4, 2), "gradients of weights lie over its gradients");
  expect_invalid(update(numbers.data() + 3, 0), "gradients of weights lie over its gradients");
  EXPECT_EQ(stats_of(table_).updates, 0U);
  EXPECT_EQ(update(numbers.data() + 4, 0), RECSDK_OK);
  expect_invalid(recsdk_table_norm_factors(table_, rows_.data(), outcomes_.data(), 2, 1.0, 2.0,
                                           reinterpret_cast<float*>(rows_.data())),
                 "factors lie over its rows");
}

TEST_F(CApiErrorsTest, BadBags) {
  ASSERT_EQ(recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, rows_.data(), outcomes_.data()),
            RECSDK_OK);
  const std::array<std::int64_t, 3> good = {0, 1, 2};
  const std::array<std::int64_t, 3> descending = {0, 3, 2};
  const std::array<std::int64_t, 3> short_offsets = {0, 1, 1};
  const recsdk_bags bags = {rows_.data(), outcomes_.data(),   2, good.data(), 2,
                            nullptr,      RECSDK_POOLING_SUM, 0};
  const auto expect_bad = [&](const std::string& text,
                              const std::function<void(recsdk_bags&)>& spoil) {
    recsdk_pool_block forward = {bags, values_.data(), 2};
    recsdk_grad_block backward = {bags, values_.data(), 2, nullptr};
    spoil(forward.bags);
    spoil(backward.bags);
    expect_invalid(recsdk_table_pool(table_, &forward, 1), text);
    expect_invalid(recsdk_table_update(table_, &backward, 1), text);
    const recsdk_pool_call pool = {table_, &forward, 1};
    const recsdk_update_call update = {table_, &backward, 1};
    expect_invalid(recsdk_pool_tables(&pool, 1), text);
    expect_invalid(recsdk_update_tables(&update, 1), text);
  };
  const std::array<std::int64_t, 2> beyond = {0, 2};
  const std::array<std::int64_t, 2> negative = {0, -1};
  expect_bad("rows must not be null", [](recsdk_bags& b) { b.rows = nullptr; });
  expect_bad("outcomes must not be null", [](recsdk_bags& b) { b.outcomes = nullptr; });
  expect_bad("must not be negative, got -2", [](recsdk_bags& b) { b.num_keys = -2; });
  expect_bad("num_bags must not be negative, got -1", [](recsdk_bags& b) { b.num_bags = -1; });
  expect_bad("because offsets is null",
             [](recsdk_bags& b) { b.offsets = nullptr, b.num_bags = 1; });
  expect_bad("pooling must be 0 to 1, got 2", [](recsdk_bags& b) { b.pooling = 2; });
  expect_bad("reserved must be 0, got 1", [](recsdk_bags& b) { b.reserved = 1; });
  expect_bad("offsets must not descend, got 2 after 3 at 2; pass them in ascending order",
             [&](recsdk_bags& b) { b.offsets = descending.data(); });
  expect_bad("offsets", [&](recsdk_bags& b) { b.offsets = short_offsets.data(); });
  expect_bad(", got 2", [&](recsdk_bags& b) { b.rows = beyond.data(); });
  expect_bad(", got -1", [&](recsdk_bags& b) { b.rows = negative.data(); });
}

TEST_F(CApiErrorsTest, NoRowExistsInAnEmptyTable) {
  rows_ = {0, 0};
  outcomes_ = {RECSDK_OUTCOME_FOUND, RECSDK_OUTCOME_FOUND};
  const recsdk_bags bags = {rows_.data(), outcomes_.data(),   2, nullptr, 2,
                            nullptr,      RECSDK_POOLING_SUM, 0};
  const recsdk_pool_block forward = {bags, values_.data(), 2};
  expect_invalid(recsdk_table_pool(table_, &forward, 1), ", got 0");
}

TEST_F(CApiErrorsTest, BadBlocks) {
  ASSERT_EQ(recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, rows_.data(), outcomes_.data()),
            RECSDK_OK);
  const recsdk_bags bags = {rows_.data(), outcomes_.data(),   2, nullptr, 2,
                            nullptr,      RECSDK_POOLING_SUM, 0};
  const auto pool = [&](recsdk_pool_block block) { return recsdk_table_pool(table_, &block, 1); };
  const auto update = [&](recsdk_grad_block block) {
    return recsdk_table_update(table_, &block, 1);
  };
  expect_invalid(pool({bags, nullptr, 2}), "out must not be null");
  expect_invalid(pool({bags, values_.data(), 1}), ", got 1");
  expect_invalid(update({bags, nullptr, 2, nullptr}), "grad must not be null");
  expect_invalid(update({bags, values_.data(), 1, nullptr}), ", got 1");
  expect_invalid(update({bags, values_.data(), -2, nullptr}), ", got -2");
  // Two vectors so far apart lie in no array, and the second would lie before the first.
  for (const std::int64_t stride :
       {std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 60}) {
    const std::string message = "to 1152921504606846975, got " + std::to_string(stride);
    expect_invalid(pool({bags, values_.data(), stride}), message);
    expect_invalid(update({bags, values_.data(), stride, nullptr}), message);
  }
  expect_invalid(update({bags, values_.data(), 2, values_.data()}), "weights");
}

TEST_F(CApiErrorsTest, BadCallsOverManyTables) {
  recsdk_map_call map = {table_, keys_.data(), 2, nullptr, rows_.data(), outcomes_.data(), 1, 1};
  expect_invalid(recsdk_map_tables(&map, 1), "reserved");
  map.reserved = 0;
  const std::array twice = {map, map};
  expect_invalid(recsdk_map_tables(twice.data(), 2), "twice");
  map.table = nullptr;
  const recsdk_pool_call pool = {nullptr, nullptr, 0};
  const recsdk_update_call update = {nullptr, nullptr, 0};
  expect_invalid(recsdk_map_tables(&map, 1), "table must not be null");
  expect_invalid(recsdk_pool_tables(&pool, 1), "table must not be null");
  expect_invalid(recsdk_update_tables(&update, 1), "table must not be null");
  EXPECT_EQ(size_of(table_), 0);
}

TEST_F(CApiErrorsTest, ABadPartStopsACallOverManyTablesBeforeItStarts) {
  const TableHandle other = make_table(default_config(2));
  const LeaseHandle foreign = take_lease(other.get(), 1, 0);
  const TableHandle third = make_table(default_config(2));
  const recsdk_map_call good = {table_,       keys_.data(),     2, nullptr,
                                rows_.data(), outcomes_.data(), 1, 0};
  const recsdk_map_call bad = {third.get(),  keys_.data(),     2, foreign.get(),
                               rows_.data(), outcomes_.data(), 1, 0};
  const std::array calls = {good, bad};
  expect_invalid(recsdk_map_tables(calls.data(), 2), "lease");
  EXPECT_EQ(size_of(table_), 0);
}

TEST_F(CApiErrorsTest, BusyWhileStepsAreOpen) {
  const LeaseHandle lease = take_lease(table_, 1, 3);
  const auto expect_busy = [](int status) {
    expect_failure(status, RECSDK_ERROR_BUSY, "in flight");
  };
  expect_busy(
      recsdk_table_map(table_, keys_.data(), 2, 1, nullptr, rows_.data(), outcomes_.data()));
  expect_busy(
      recsdk_table_find_or_insert(table_, keys_.data(), 2, nullptr, values_.data(), nullptr));
  expect_busy(recsdk_table_upsert(table_, keys_.data(), 2, values_.data(), nullptr, nullptr));
  expect_busy(recsdk_table_erase(table_, keys_.data(), 2, nullptr));
  expect_busy(recsdk_table_clear(table_));
  recsdk_lease* earlier = nullptr;
  expect_invalid(recsdk_table_lease(table_, 1, 2, &earlier), "step 2");
  EXPECT_EQ(earlier, nullptr);
}

TEST_F(CApiErrorsTest, FullTables) {
  recsdk_table_config config = default_config(1);
  config.has_max_rows = 1;
  config.max_rows = 1;
  config.on_full = RECSDK_ON_FULL_RAISE;
  const TableHandle table = make_table(config);
  expect_failure(
      recsdk_table_find_or_insert(table.get(), keys_.data(), 2, nullptr, values_.data(), nullptr),
      RECSDK_ERROR_CAPACITY,
      "is full: 0 of 1 rows are used, and more new keys come than are left; raise max_rows");
  EXPECT_EQ(stats_of(table.get()).num_rows, 0);
}

TEST_F(CApiErrorsTest, NonFiniteGradients) {
  recsdk_table_config config = default_config(1);
  config.on_nonfinite = RECSDK_NONFINITE_RAISE;
  const TableHandle table = make_table(config);
  ASSERT_EQ(
      recsdk_table_find_or_insert(table.get(), keys_.data(), 2, nullptr, values_.data(), nullptr),
      RECSDK_OK);
  const std::array gradients = {1.0F, std::numeric_limits<float>::infinity()};
  expect_failure(
      recsdk_table_apply_gradients(table.get(), keys_.data(), 2, gradients.data(), nullptr),
      RECSDK_ERROR_NON_FINITE, "not a number");
  EXPECT_EQ(stats_of(table.get()).updates, 0U);
}

TEST_F(CApiErrorsTest, BadCounters) {
  expect_invalid(recsdk_table_set_learning_rate(table_, -1.0F), "learning_rate");
  expect_failure(recsdk_table_reserve(table_, std::numeric_limits<std::int64_t>::max()),
                 RECSDK_ERROR_CAPACITY, "rows");
}

// A callback fails in the way that user_data says.
enum class Failure { kStatus, kException };

int failing_callback(void* user_data, const std::int64_t*, std::int64_t, std::int64_t, float*) {
  if (*static_cast<Failure*>(user_data) == Failure::kException)
    throw std::runtime_error("from a callback");
  return 17;
}

TEST_F(CApiErrorsTest, FailingCallbacksChangeNothing) {
  Failure failure = Failure::kStatus;
  recsdk_initializer_config initializer = default_initializer();
  initializer.kind = RECSDK_INITIALIZER_CUSTOM;
  initializer.callback = failing_callback;
  initializer.user_data = &failure;
  recsdk_table_config config = default_config(2);
  config.initializer = &initializer;
  const TableHandle table = make_table(config);
  const auto insert = [&] {
    return recsdk_table_find_or_insert(table.get(), keys_.data(), 2, nullptr, values_.data(),
                                       nullptr);
  };
  expect_failure(insert(), RECSDK_ERROR_INTERNAL, "returned 17");
  failure = Failure::kException;
  expect_failure(insert(), RECSDK_ERROR_INTERNAL, "from a callback");
  EXPECT_EQ(size_of(table.get()), 0);
  EXPECT_EQ(recsdk_table_check_invariants(table.get()), RECSDK_OK);
}

}  // namespace
}  // namespace recsdk::test::c_api_errors_test
