// What the tests of the C interface share: tables that free themselves, and a check of statuses.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "recsdk/c_api.h"

namespace recsdk::test {

struct DestroyTable {
  void operator()(recsdk_table* table) const { recsdk_table_destroy(table); }
};
using TableHandle = std::unique_ptr<recsdk_table, DestroyTable>;

struct ReleaseLease {
  void operator()(recsdk_lease* lease) const { recsdk_lease_release(lease); }
};
using LeaseHandle = std::unique_ptr<recsdk_lease, ReleaseLease>;

inline recsdk_table_config default_config(std::int64_t dim) {
  recsdk_table_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_table_config_init(&config), RECSDK_OK);
  config.dim = dim;
  return config;
}

inline recsdk_optimizer_config default_optimizer(std::int32_t kind) {
  recsdk_optimizer_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_optimizer_config_init(&config, kind), RECSDK_OK);
  return config;
}

inline recsdk_initializer_config default_initializer() {
  recsdk_initializer_config config{};
  config.struct_size = sizeof(config);
  EXPECT_EQ(recsdk_initializer_config_init(&config), RECSDK_OK);
  return config;
}

inline TableHandle make_table(const recsdk_table_config& config) {
  recsdk_table* table = nullptr;
  EXPECT_EQ(recsdk_table_create(&config, &table), RECSDK_OK) << recsdk_last_error_message();
  return TableHandle(table);
}

inline LeaseHandle take_lease(recsdk_table* table, int has_step, std::int64_t step) {
  recsdk_lease* lease = nullptr;
  EXPECT_EQ(recsdk_table_lease(table, has_step, step, &lease), RECSDK_OK)
      << recsdk_last_error_message();
  return LeaseHandle(lease);
}

inline std::int64_t size_of(const recsdk_table* table) {
  std::int64_t size = -1;
  EXPECT_EQ(recsdk_table_size(table, &size), RECSDK_OK);
  return size;
}

inline recsdk_stats stats_of(const recsdk_table* table) {
  recsdk_stats stats{};
  stats.struct_size = sizeof(stats);
  EXPECT_EQ(recsdk_table_stats(table, &stats), RECSDK_OK);
  return stats;
}

/// The call failed with this code, and its message holds this text.
inline void expect_failure(int status, int code, const std::string& text) {
  EXPECT_EQ(status, code);
  EXPECT_NE(std::string(recsdk_last_error_message()).find(text), std::string::npos)
      << "message: " << recsdk_last_error_message();
}

inline void expect_invalid(int status, const std::string& text) {
  expect_failure(status, RECSDK_ERROR_INVALID_ARGUMENT, text);
}

}  // namespace recsdk::test
