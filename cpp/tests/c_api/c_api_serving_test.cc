// The C interface of serving: answers as in C++, statuses, and what a failed call says.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "fuzz/serving_operations.h"
#include "profile.h"
#include "recsdk/serving/c_api.h"
#include "support/frozen_tables.h"

namespace recsdk::test::c_api_serving_test {
namespace {

using Values = std::vector<float>;

static_assert(std::is_same_v<decltype(recsdk_serving_abi_version()), std::uint32_t>);

TEST(CApiServingTest, AnswersAndRefusesAsInCpp) {
  const TemporaryFolder folder;
  const std::string path =
      freeze({{-7, {1.0F, 2.0F}}}, config_of(folder, 2, FrozenDType::kFloat32))[0];
  const char* const files[] = {path.c_str()};
  recsdk_serving_table* table = nullptr;
  ASSERT_EQ(recsdk_serving_open(files, 1, &table), RECSDK_SERVING_OK);
  recsdk_serving_info info{};
  EXPECT_EQ(recsdk_serving_get_info(table, &info), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  info.struct_size = sizeof(info);
  ASSERT_EQ(recsdk_serving_get_info(table, &info), RECSDK_SERVING_OK);
  EXPECT_STREQ(info.name, "item");
  EXPECT_EQ(info.num_rows, 1);
  const std::int64_t keys[] = {-7, 8};
  float values[4];
  std::uint8_t outcomes[2];
  ASSERT_EQ(recsdk_serving_lookup(table, keys, 2, values, outcomes), RECSDK_SERVING_OK);
  EXPECT_EQ(Values(values, values + 4), (Values{1.0F, 2.0F, kDefault, kDefault}));
  EXPECT_EQ(outcomes[0], RECSDK_SERVING_FOUND);
  EXPECT_EQ(outcomes[1], RECSDK_SERVING_MISSING);
  const std::int64_t offsets[] = {0, 2};
  recsdk_serving_call call{table, keys,   2, offsets, 1, nullptr, RECSDK_SERVING_MEAN,
                           0,     values, 2, nullptr};
  ASSERT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_OK);
  EXPECT_EQ(Values(values, values + 2), (Values{-0.75F, -0.25F}));
  call.pooling = 2;
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(recsdk_serving_last_error_message()).find("got 2"), std::string::npos);
  call.pooling = RECSDK_SERVING_SUM;
  call.num_bags = -1;
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  call.num_bags = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  call.offsets = nullptr;
  call.num_bags = 2;
  call.stride = std::int64_t{1} << 60;
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(recsdk_serving_last_error_message()).find("to 1152921504606846975, got"),
            std::string::npos);
  EXPECT_EQ(recsdk_serving_verify(table), RECSDK_SERVING_OK);
  EXPECT_EQ(recsdk_serving_preload(table), RECSDK_SERVING_OK);
  EXPECT_EQ(recsdk_serving_lookup(nullptr, keys, 2, values, nullptr),
            RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  recsdk_serving_close(table);
  const char* const nothing[] = {"/nowhere/x.frozen"};
  EXPECT_EQ(recsdk_serving_open(nothing, 1, &table), RECSDK_SERVING_ERROR_FILE);
  std::int64_t shard = -1;
  ASSERT_EQ(recsdk_serving_shard(-7, 3, &shard), RECSDK_SERVING_OK);
  EXPECT_EQ(shard, serving_shard(-7, 3));
  EXPECT_EQ(recsdk_serving_shard(-7, 0, &shard), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_serving_abi_version(), RECSDK_SERVING_ABI_VERSION);
}

TEST(CApiServingTest, TakesDeltasAsInCpp) {
  const TemporaryFolder folder;
  const std::string path =
      freeze({{-7, {1.0F, 2.0F}}}, config_of(folder, 2, FrozenDType::kFloat32))[0];
  const char* const files[] = {path.c_str()};
  recsdk_serving_table* table = nullptr;
  ASSERT_EQ(recsdk_serving_open(files, 1, &table), RECSDK_SERVING_OK);
  recsdk_serving_delta* delta = nullptr;
  ASSERT_EQ(recsdk_serving_delta_create(table, &delta), RECSDK_SERVING_OK);
  const std::int64_t keys[] = {8, 9};
  const float rows[] = {3.0F, 4.0F, 5.0F, 6.0F};
  const std::int64_t gone = -7;
  ASSERT_EQ(recsdk_serving_delta_add(delta, keys, 2, rows), RECSDK_SERVING_OK);
  ASSERT_EQ(recsdk_serving_delta_erase(delta, &gone, 1), RECSDK_SERVING_OK);
  ASSERT_EQ(recsdk_serving_take(table, delta), RECSDK_SERVING_OK);
  const std::int64_t asked[] = {-7, 9};
  float values[4];
  ASSERT_EQ(recsdk_serving_lookup(table, asked, 2, values, nullptr), RECSDK_SERVING_OK);
  EXPECT_EQ(Values(values, values + 4), (Values{kDefault, kDefault, 5.0F, 6.0F}));
  recsdk_serving_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(recsdk_serving_get_info(table, &info), RECSDK_SERVING_OK);
  EXPECT_EQ(info.num_rows, 2);
  EXPECT_EQ(info.num_deltas, 1);
  EXPECT_GT(info.delta_bytes, 0);
  ASSERT_EQ(recsdk_serving_delta_add(delta, keys, 1, rows), RECSDK_SERVING_OK);
  EXPECT_EQ(recsdk_serving_take(table, delta), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_serving_delta_add(delta, keys, 1, nullptr),
            RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_serving_take(table, nullptr), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  recsdk_serving_delta_destroy(delta);
  recsdk_serving_close(table);
}

struct CloseTable {
  void operator()(recsdk_serving_table* table) const { recsdk_serving_close(table); }
};

TEST(CApiServingTest, ReservedFieldsMustBeZero) {
  const TemporaryFolder folder;
  const std::string path =
      freeze({{-7, {1.0F, 2.0F}}}, config_of(folder, 2, FrozenDType::kFloat32))[0];
  const char* const files[] = {path.c_str()};
  recsdk_serving_table* opened = nullptr;
  ASSERT_EQ(recsdk_serving_open(files, 1, &opened), RECSDK_SERVING_OK);
  const std::unique_ptr<recsdk_serving_table, CloseTable> table(opened);
  const std::int64_t key = -7;
  float values[2] = {9.0F, 9.0F};
  recsdk_serving_call call{table.get(),        &key, 1,      nullptr, 1,      nullptr,
                           RECSDK_SERVING_SUM, 1,    values, 2,       nullptr};
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(recsdk_serving_last_error_message(),
               "recsdk_serving_call.reserved must be 0, got 1");
  EXPECT_EQ(values[0], 9.0F);
  call.reserved = 0;
  EXPECT_EQ(recsdk_serving_pool(&call, 1), RECSDK_SERVING_OK);
  EXPECT_EQ(values[0], 1.0F);
}

TEST(CApiServingTest, WhatACallWritesLiesOverNothingElse) {
  const TemporaryFolder folder;
  const std::string path =
      freeze({{-7, {1.0F, 2.0F}}}, config_of(folder, 2, FrozenDType::kFloat32))[0];
  const char* const files[] = {path.c_str()};
  recsdk_serving_table* opened = nullptr;
  ASSERT_EQ(recsdk_serving_open(files, 1, &opened), RECSDK_SERVING_OK);
  const std::unique_ptr<recsdk_serving_table, CloseTable> table(opened);
  std::int64_t keys[] = {-7, 8};
  std::int64_t offsets[] = {0, 1, 2};
  float numbers[8] = {1.0F, 1.0F};
  std::uint8_t outcomes[2];
  const auto expect_refused = [](int status, const std::string& what) {
    EXPECT_EQ(status, RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
    const std::string message = recsdk_serving_last_error_message();
    EXPECT_NE(message.find(what + "; pass arrays of their own"), std::string::npos) << message;
  };
  const auto pool = [&](void* out, void* said) {
    const recsdk_serving_call call{table.get(),
                                   keys,
                                   2,
                                   offsets,
                                   2,
                                   numbers,
                                   RECSDK_SERVING_SUM,
                                   0,
                                   static_cast<float*>(out),
                                   2,
                                   static_cast<std::uint8_t*>(said)};
    return recsdk_serving_pool(&call, 1);
  };
  expect_refused(pool(numbers + 2, keys), "outcomes lie over its keys");
  expect_refused(pool(numbers + 2, offsets), "outcomes lie over its offsets");
  expect_refused(pool(numbers + 2, numbers), "outcomes lie over its weights");
  expect_refused(pool(keys, outcomes), "vectors lie over its keys");
  expect_refused(pool(offsets, outcomes), "vectors lie over its offsets");
  expect_refused(pool(numbers + 1, outcomes), "vectors lie over its weights");
  expect_refused(pool(numbers + 2, numbers + 5), "vectors lie over its outcomes");
  EXPECT_EQ(pool(numbers + 2, numbers + 6), RECSDK_SERVING_OK);
  const auto look_up = [&](void* values, void* said) {
    return recsdk_serving_lookup(table.get(), keys, 2, static_cast<float*>(values),
                                 static_cast<std::uint8_t*>(said));
  };
  expect_refused(look_up(numbers, keys), "outcomes lie over its keys");
  expect_refused(look_up(keys, outcomes), "values lie over its keys");
  expect_refused(look_up(numbers, numbers + 3), "values lie over its outcomes");
  EXPECT_EQ(look_up(numbers, numbers + 4), RECSDK_SERVING_OK);
  // Of two calls, of which the first would write over what the second reads.
  const auto pool_two = [&](void* out, void* said) {
    recsdk_serving_call calls[2] = {};
    for (recsdk_serving_call& call : calls) {
      call.table = table.get();
      call.keys = keys;
      call.num_keys = call.num_bags = 2;
      call.stride = 2;
      call.out = numbers;
    }
    calls[0].out = static_cast<float*>(out);
    calls[0].outcomes = static_cast<std::uint8_t*>(said);
    std::int64_t others[] = {8, -7};
    if (out == keys) calls[0].keys = others;
    return recsdk_serving_pool(calls, 2);
  };
  expect_refused(pool_two(keys, outcomes), "vectors lie over keys of serving table 'item'");
  expect_refused(pool_two(numbers + 2, outcomes),
                 "vectors lie over vectors of serving table 'item'");
  expect_refused(pool_two(numbers + 4, numbers + 1),
                 "vectors lie over outcomes of serving table 'item'");
  EXPECT_EQ(pool_two(numbers + 4, outcomes), RECSDK_SERVING_OK);
  EXPECT_EQ(keys[0], -7);
}

TEST(CApiServingTest, LongMessagesAreCutBetweenCharacters) {
  recsdk_serving_table* table = nullptr;
  const auto said_of = [&](const std::string& path) -> std::string {
    const char* const files[] = {path.c_str()};
    EXPECT_EQ(recsdk_serving_open(files, 1, &table), RECSDK_SERVING_ERROR_FILE);
    return recsdk_serving_last_error_message();
  };
  const std::string path = "/" + std::string(1019, 'x');
  EXPECT_EQ(said_of(path + "abcdef"), path + "abc");
  // A character of three bytes of which the last would not fit.
  EXPECT_EQ(said_of(path + "a\xe2\x82\xac"), path + "a");
  EXPECT_EQ(said_of("/nowhere"), "/nowhere: opening it failed: No such file or directory");
}

TEST(CApiServingFuzzTest, AnyArgumentsAreRefusedOrDoneAsMapsDoThem) {
  const std::uint32_t num_seeds = is_full_profile() ? 5000 : 300;
  for (std::uint32_t seed = 0; seed < num_seeds; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(64 + random() % 3000);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    EXPECT_NO_THROW(run_serving(bytes.data(), bytes.size())) << "seed " << seed;
  }
}

}  // namespace
}  // namespace recsdk::test::c_api_serving_test
