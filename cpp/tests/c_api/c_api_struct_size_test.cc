// Structs of an older header, which end before the library's: what they lack takes its default, and
// nothing behind their end is read or written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/c_api.h"

namespace recsdk::test::c_api_struct_size_test {
namespace {

constexpr unsigned char kForeign = 0xAB;  // a byte that is not the struct's

/// A struct of `size` bytes, and behind them what is not its own.
template <typename T>
T older(std::size_t size) {
  T made;
  std::memset(&made, kForeign, sizeof(made));
  made.struct_size = size;
  return made;
}

template <typename T>
std::vector<unsigned char> bytes_of(const T& value) {
  std::vector<unsigned char> bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

/// `fill` gives a struct of each size the same fields, and leaves what is behind its end.
template <typename T, typename Fill>
void expect_filled_to_the_end(Fill fill) {
  T whole{};
  whole.struct_size = sizeof(whole);
  ASSERT_EQ(fill(&whole), RECSDK_OK) << recsdk_last_error_message();
  for (std::size_t size = 2 * alignof(T); size < sizeof(T); size += alignof(T)) {
    SCOPED_TRACE("size " + std::to_string(size));
    T made = older<T>(size);
    ASSERT_EQ(fill(&made), RECSDK_OK) << recsdk_last_error_message();
    std::vector<unsigned char> wanted = bytes_of(whole);
    std::memcpy(wanted.data(), &size, sizeof(size));
    std::fill(wanted.begin() + static_cast<std::ptrdiff_t>(size), wanted.end(), kForeign);
    EXPECT_EQ(bytes_of(made), wanted);
  }
  for (const std::size_t size : {sizeof(std::size_t), sizeof(T) - 1, sizeof(T) + alignof(T)}) {
    T made = older<T>(size);
    expect_invalid(fill(&made), ", got " + std::to_string(size));
  }
}

TEST(CApiStructSizeTest, InitFillsWhatTheCallerKnows) {
  for (const int kind : {RECSDK_OPTIMIZER_SGD, RECSDK_OPTIMIZER_FTRL}) {
    expect_filled_to_the_end<recsdk_optimizer_config>(
        [kind](auto* config) { return recsdk_optimizer_config_init(config, kind); });
  }
  expect_filled_to_the_end<recsdk_initializer_config>(recsdk_initializer_config_init);
  expect_filled_to_the_end<recsdk_table_config>(recsdk_table_config_init);
  expect_filled_to_the_end<recsdk_device_options>(recsdk_device_options_init);
  expect_filled_to_the_end<recsdk_write_options>(recsdk_write_options_init);
  expect_filled_to_the_end<recsdk_default_config>(recsdk_default_config_init);
  expect_filled_to_the_end<recsdk_evict_config>(recsdk_evict_config_init);
  expect_filled_to_the_end<recsdk_admit_config>(recsdk_admit_config_init);
  expect_filled_to_the_end<recsdk_leavers_options>(recsdk_leavers_options_init);
}

TEST(CApiStructSizeTest, ResultsFillWhatTheCallerKnows) {
  const TableHandle table = make_table(default_config(4));
  const std::int64_t key = 3;
  std::vector<float> row(4);
  ASSERT_EQ(recsdk_table_find_or_insert(table.get(), &key, 1, nullptr, row.data(), nullptr),
            RECSDK_OK);
  expect_filled_to_the_end<recsdk_stats>(
      [&](auto* stats) { return recsdk_table_stats(table.get(), stats); });
  expect_filled_to_the_end<recsdk_row_layout>(
      [&](auto* layout) { return recsdk_table_layout(table.get(), layout); });
  expect_filled_to_the_end<recsdk_row_field>(
      [&](auto* field) { return recsdk_table_field(table.get(), 0, field); });
  recsdk_cut* cut = nullptr;
  ASSERT_EQ(recsdk_table_cut(table.get(), nullptr, &cut), RECSDK_OK);
  expect_filled_to_the_end<recsdk_cut_info>(
      [&](auto* info) { return recsdk_cut_get_info(cut, info); });
  expect_filled_to_the_end<recsdk_shared_rows>(
      [&](auto* shared) { return recsdk_cut_get_shared(cut, shared); });
  recsdk_cut_destroy(cut);

  const recsdk_table_config config = default_config(4);
  recsdk_device_options options{};
  options.struct_size = sizeof(options);
  ASSERT_EQ(recsdk_device_options_init(&options), RECSDK_OK);
  options.backend = "cpu";
  options.max_device_rows = 2;
  recsdk_device_table* device = nullptr;
  ASSERT_EQ(recsdk_device_table_create(&config, &options, &device), RECSDK_OK);
  expect_filled_to_the_end<recsdk_device_stats>(
      [&](auto* stats) { return recsdk_device_table_stats(device, stats); });
  recsdk_device_table_destroy(device);
}

/// What a table made with these configs of older headers is; foreign bytes would be refused.
TableHandle table_of_older(std::size_t config_size, std::size_t optimizer_size,
                           std::size_t initializer_size) {
  auto optimizer = older<recsdk_optimizer_config>(optimizer_size);
  EXPECT_EQ(recsdk_optimizer_config_init(&optimizer, RECSDK_OPTIMIZER_ADAGRAD), RECSDK_OK);
  auto initializer = older<recsdk_initializer_config>(initializer_size);
  EXPECT_EQ(recsdk_initializer_config_init(&initializer), RECSDK_OK);
  auto config = older<recsdk_table_config>(config_size);
  EXPECT_EQ(recsdk_table_config_init(&config), RECSDK_OK);
  config.dim = 3;
  if (config_size > offsetof(recsdk_table_config, optimizer)) config.optimizer = &optimizer;
  if (config_size > offsetof(recsdk_table_config, initializer)) config.initializer = &initializer;
  return make_table(config);
}

TEST(CApiStructSizeTest, FieldsThatAConfigLacksTakeTheirDefaults) {
  constexpr std::size_t kWhole = sizeof(recsdk_table_config);
  constexpr std::size_t kOptimizer = sizeof(recsdk_optimizer_config);
  constexpr std::size_t kInitializer = sizeof(recsdk_initializer_config);
  for (std::size_t size = 16; size <= kWhole; size += 8)
    EXPECT_NE(table_of_older(size, kOptimizer, kInitializer), nullptr) << size;
  for (std::size_t size = 16; size <= kInitializer; size += 8)
    EXPECT_NE(table_of_older(kWhole, kOptimizer, size), nullptr) << size;
  for (std::size_t size = 16; size <= kOptimizer; size += 8) {
    const TableHandle table = table_of_older(kWhole, size, kInitializer);
    float rate = 0.0F;
    ASSERT_EQ(recsdk_table_learning_rate(table.get(), &rate), RECSDK_OK);
    EXPECT_EQ(rate, 0.01F) << size;
    recsdk_row_field field{};
    field.struct_size = sizeof(field);
    ASSERT_EQ(recsdk_table_field(table.get(), 1, &field), RECSDK_OK);
    EXPECT_STREQ(field.name, "sum");
  }
}

// Adagrad divides by eps for a row without gradients so far: its default shows in the result.
TEST(CApiStructSizeTest, AnOptimizerOfAnOlderHeaderTrainsAsThatOfThisOne) {
  std::vector<float> wanted;
  for (const std::size_t size : {sizeof(recsdk_optimizer_config), std::size_t{16}}) {
    const TableHandle table =
        table_of_older(sizeof(recsdk_table_config), size, sizeof(recsdk_initializer_config));
    const std::int64_t key = 3;
    const std::vector<float> gradient = {1e-9F, -2.0F, 0.5F};
    std::vector<float> row(3);
    ASSERT_EQ(recsdk_table_find_or_insert(table.get(), &key, 1, nullptr, row.data(), nullptr),
              RECSDK_OK);
    ASSERT_EQ(recsdk_table_apply_gradients(table.get(), &key, 1, gradient.data(), nullptr),
              RECSDK_OK);
    ASSERT_EQ(recsdk_table_lookup(table.get(), &key, 1, row.data(), nullptr), RECSDK_OK);
    if (wanted.empty()) wanted = row;
    EXPECT_EQ(row, wanted);
  }
}

TEST(CApiStructSizeTest, OptionsThatEndEarlyAskForNothingMore) {
  const TableHandle table = make_table(default_config(4));
  auto cut_options = older<recsdk_cut_options>(16);
  cut_options.max_copy_bytes = 1;  // it has no flag that says so
  recsdk_cut* cut = nullptr;
  ASSERT_EQ(recsdk_table_cut(table.get(), &cut_options, &cut), RECSDK_OK)
      << recsdk_last_error_message();
  recsdk_cut_destroy(cut);

  const recsdk_table_config config = default_config(4);
  auto options = older<recsdk_device_options>(offsetof(recsdk_device_options, device));
  ASSERT_EQ(recsdk_device_options_init(&options), RECSDK_OK);
  options.backend = "cpu";
  options.max_device_rows = 2;
  recsdk_device_table* device = nullptr;
  ASSERT_EQ(recsdk_device_table_create(&config, &options, &device), RECSDK_OK)
      << recsdk_last_error_message();
  recsdk_device_table_destroy(device);
}

}  // namespace
}  // namespace recsdk::test::c_api_struct_size_test
