// Every function of the C interface does what its C++ counterpart does.
#include "recsdk/c_api.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/recsdk.h"

namespace recsdk::test::c_api_test {
namespace {

using Floats = std::vector<float>;
using Keys = std::vector<std::int64_t>;
using Bytes = std::vector<std::uint8_t>;

// Row k starts as {k, k, ...}.
int rows_of_key(void* user_data, const std::int64_t* keys, std::int64_t num_keys, std::int64_t dim,
                float* values) {
  ++*static_cast<std::atomic<int>*>(user_data);
  for (std::int64_t i = 0; i < num_keys * dim; ++i) values[i] = static_cast<float>(keys[i / dim]);
  return 0;
}

// SGD with a rate of 0.5 and two columns; keys start as their own value.
class CApiTest : public testing::Test {
 protected:
  CApiTest() {
    optimizer_.learning_rate = 0.5F;
    initializer_.kind = RECSDK_INITIALIZER_CUSTOM;
    initializer_.callback = rows_of_key;
    initializer_.user_data = &num_callbacks_;
    config_.optimizer = &optimizer_;
    config_.initializer = &initializer_;
    table_ = make_table(config_);
  }

  Floats lookup(const Keys& keys) const {
    Floats values(keys.size() * 2);
    EXPECT_EQ(
        recsdk_table_lookup(table_.get(), keys.data(), std::ssize(keys), values.data(), nullptr),
        RECSDK_OK);
    return values;
  }
  void insert(const Keys& keys) {
    Floats values(keys.size() * 2);
    EXPECT_EQ(recsdk_table_find_or_insert(table_.get(), keys.data(), std::ssize(keys), nullptr,
                                          values.data(), nullptr),
              RECSDK_OK);
  }

  std::atomic<int> num_callbacks_{0};  // tables may run their callbacks side by side
  recsdk_optimizer_config optimizer_ = default_optimizer(RECSDK_OPTIMIZER_SGD);
  recsdk_initializer_config initializer_ = default_initializer();
  recsdk_table_config config_ = default_config(2);
  TableHandle table_;
};

TEST(CApiRuntimeTest, TellsVersions) {
  EXPECT_EQ(recsdk_abi_version(), std::uint32_t{RECSDK_ABI_VERSION});
  EXPECT_STREQ(recsdk_version(), version());
}

// A struct that changes without a new RECSDK_ABI_VERSION fails here. None ends with padding, so
// that a field at the end always makes it larger.
static_assert(sizeof(void*) != 8 || RECSDK_ABI_VERSION != 1 ||
              (sizeof(recsdk_initializer_config) == 48 && sizeof(recsdk_optimizer_config) == 120 &&
               sizeof(recsdk_table_config) == 152 && sizeof(recsdk_bags) == 56 &&
               sizeof(recsdk_pool_block) == 72 && sizeof(recsdk_grad_block) == 80 &&
               sizeof(recsdk_map_call) == 56 && sizeof(recsdk_pool_call) == 24 &&
               sizeof(recsdk_update_call) == 24 && sizeof(recsdk_row_layout) == 48 &&
               sizeof(recsdk_row_field) == 48 && sizeof(recsdk_stats) == 280 &&
               sizeof(recsdk_cut_options) == 24 && sizeof(recsdk_cut_info) == 72 &&
               sizeof(recsdk_write_options) == 64 && sizeof(recsdk_row_file_summary) == 72 &&
               sizeof(recsdk_restore_options) == 48 && sizeof(recsdk_admit_config) == 56 &&
               sizeof(recsdk_admit_term) == 48 && sizeof(recsdk_clock) == 48 &&
               sizeof(recsdk_evict_config) == 160 && sizeof(recsdk_default_config) == 32 &&
               sizeof(recsdk_shared_rows) == 40));

TEST(CApiRuntimeTest, ListsAndSwitchesInstructionSets) {
  const char* const* names = nullptr;
  std::int64_t num_names = 0;
  ASSERT_EQ(recsdk_available_isas(&names, &num_names), RECSDK_OK);
  EXPECT_EQ(std::vector<std::string>(names, names + num_names), available_isas());

  const std::string before = isa();
  for (std::int64_t i = 0; i < num_names; ++i) {
    ASSERT_EQ(recsdk_set_isa(names[i]), RECSDK_OK);
    const char* current = nullptr;
    ASSERT_EQ(recsdk_isa(&current), RECSDK_OK);
    EXPECT_STREQ(current, names[i]);
  }
  set_isa(before);
}

TEST(CApiRuntimeTest, ChangesTheNumberOfThreads) {
  std::int32_t before = 0;
  ASSERT_EQ(recsdk_num_threads(&before), RECSDK_OK);
  ASSERT_EQ(recsdk_set_num_threads(3), RECSDK_OK);
  std::int32_t now = 0;
  ASSERT_EQ(recsdk_num_threads(&now), RECSDK_OK);
  EXPECT_EQ(now, 3);
  EXPECT_EQ(recsdk_set_num_threads(before), RECSDK_OK);
}

TEST(CApiRuntimeTest, HashesTableNames) {
  std::uint64_t hash = 0;
  ASSERT_EQ(recsdk_table_hash("user_id", &hash), RECSDK_OK);
  EXPECT_EQ(hash, table_hash("user_id"));
}

TEST(CApiConfigTest, OptimizersHaveTheDefaultsOfCpp) {
  const std::array expected = {OptimizerConfig::sgd(), OptimizerConfig::adagrad(),
                               OptimizerConfig::rowwise_adagrad(), OptimizerConfig::adam()};
  for (std::size_t kind = 0; kind < expected.size(); ++kind) {
    const recsdk_optimizer_config c = default_optimizer(static_cast<std::int32_t>(kind));
    EXPECT_EQ(c.kind, static_cast<std::int32_t>(kind));
    EXPECT_EQ(c.learning_rate, expected[kind].learning_rate);
    EXPECT_EQ(c.eps, expected[kind].eps);
    EXPECT_EQ(c.beta1, expected[kind].beta1);
    EXPECT_EQ(c.beta2, expected[kind].beta2);
    EXPECT_EQ(c.lr_decay, expected[kind].lr_decay);
    EXPECT_EQ(c.initial_accumulator_value, expected[kind].initial_accumulator_value);
    EXPECT_EQ(c.weight_decay, expected[kind].weight_decay);
    EXPECT_EQ(c.bias_correction, RECSDK_BIAS_CORRECTION_TABLE);
  }
}

TEST(CApiConfigTest, ATableNeedsOnlyADim) {
  const TableHandle table = make_table(default_config(3));
  const Keys keys = {5, -5};
  Floats values(6, 1.0F);
  ASSERT_EQ(
      recsdk_table_find_or_insert(table.get(), keys.data(), 2, nullptr, values.data(), nullptr),
      RECSDK_OK);
  EXPECT_EQ(values, Floats(6, 0.0F));
  float learning_rate = 0.0F;
  ASSERT_EQ(recsdk_table_learning_rate(table.get(), &learning_rate), RECSDK_OK);
  EXPECT_EQ(learning_rate, OptimizerConfig::sgd().learning_rate);
}

TEST(CApiConfigTest, AbsentValuesAreNotRead) {
  recsdk_table_config config = default_config(1);
  config.max_rows = -1;
  config.num_threads = -1;
  config.hash_seed = 1;
  make_table(config);
}

TEST(CApiConfigTest, PresentValuesCount) {
  recsdk_table_config config = default_config(1);
  config.has_max_rows = 1;
  config.max_rows = 1;
  config.has_num_threads = 1;
  config.num_threads = 2;
  config.has_hash_seed = 1;
  config.hash_seed = 12345;
  recsdk_default_config sevens{};
  sevens.struct_size = sizeof(sevens);
  ASSERT_EQ(recsdk_default_config_init(&sevens), RECSDK_OK);
  sevens.value = 7.0F;
  config.default_row = &sevens;
  const TableHandle table = make_table(config);
  const Keys keys = {2, 1};
  Floats values(2);
  Bytes outcomes(2);
  ASSERT_EQ(recsdk_table_find_or_insert(table.get(), keys.data(), 2, nullptr, values.data(),
                                        outcomes.data()),
            RECSDK_OK);
  EXPECT_EQ(outcomes, (Bytes{RECSDK_OUTCOME_INSERTED, RECSDK_OUTCOME_REFUSED}));
  EXPECT_EQ(values, (Floats{0.0F, 7.0F}));
}

TEST(CApiConfigTest, BuiltInInitializersEqualThoseOfCpp) {
  recsdk_initializer_config initializer = default_initializer();
  initializer.kind = RECSDK_INITIALIZER_TRUNCATED_NORMAL;
  initializer.mean = 1.0F;
  initializer.stddev = 0.5F;
  initializer.low = 0.5F;
  initializer.high = 1.5F;
  recsdk_table_config config = default_config(5);
  config.name = "ad";
  config.seed = 9;
  config.initializer = &initializer;
  const TableHandle table = make_table(config);

  TableConfig cpp;
  cpp.dim = 5;
  cpp.name = "ad";
  cpp.seed = 9;
  cpp.initializer = InitializerConfig::truncated_normal(1.0F, 0.5F, 0.5F, 1.5F);
  Table expected(cpp);

  const Keys keys = {0, -1, INT64_MIN, INT64_MAX};
  Floats values(20);
  Floats wanted(20);
  ASSERT_EQ(
      recsdk_table_find_or_insert(table.get(), keys.data(), 4, nullptr, values.data(), nullptr),
      RECSDK_OK);
  expected.find_or_insert(keys, wanted.data());
  EXPECT_EQ(values, wanted);
}

TEST_F(CApiTest, DescribesRecords) {
  optimizer_ = default_optimizer(RECSDK_OPTIMIZER_ADAGRAD);
  optimizer_.initial_accumulator_value = 0.25F;
  const TableHandle table = make_table(config_);
  recsdk_row_layout layout{};
  layout.struct_size = sizeof(layout);
  ASSERT_EQ(recsdk_table_layout(table.get(), &layout), RECSDK_OK);
  EXPECT_EQ(layout.dim, 2);
  EXPECT_EQ(layout.state_width, 2);
  EXPECT_EQ(layout.num_fields, 2);
  EXPECT_EQ(layout.stride % 16, 0);

  recsdk_row_field field{};
  field.struct_size = sizeof(field);
  ASSERT_EQ(recsdk_table_field(table.get(), 0, &field), RECSDK_OK);
  EXPECT_STREQ(field.name, "weight");
  EXPECT_EQ(field.offset, 0);
  ASSERT_EQ(recsdk_table_field(table.get(), 1, &field), RECSDK_OK);
  EXPECT_STREQ(field.name, "sum");
  EXPECT_EQ(field.count, 2);
  EXPECT_EQ(field.initial_value, 0.25F);
  EXPECT_EQ(field.dtype, RECSDK_DTYPE_FLOAT32);
}

TEST_F(CApiTest, FindsInsertsAndLooksUp) {
  const Keys keys = {3, -4, 3};
  Floats values(6);
  Bytes outcomes(3);
  ASSERT_EQ(recsdk_table_find_or_insert(table_.get(), keys.data(), 3, nullptr, values.data(),
                                        outcomes.data()),
            RECSDK_OK);
  EXPECT_EQ(values, (Floats{3, 3, -4, -4, 3, 3}));
  EXPECT_EQ(outcomes,
            (Bytes{RECSDK_OUTCOME_INSERTED, RECSDK_OUTCOME_INSERTED, RECSDK_OUTCOME_FOUND}));
  EXPECT_GT(num_callbacks_, 0);

  const Keys others = {-4, 99};
  Floats read(4, 1.0F);
  Bytes found(2);
  ASSERT_EQ(recsdk_table_lookup(table_.get(), others.data(), 2, read.data(), found.data()),
            RECSDK_OK);
  EXPECT_EQ(read, (Floats{-4, -4, 0, 0}));
  EXPECT_EQ(found, (Bytes{RECSDK_OUTCOME_FOUND, RECSDK_OUTCOME_MISSING}));
  EXPECT_EQ(size_of(table_.get()), 2);
}

TEST_F(CApiTest, UpsertsErasesAndClears) {
  const Keys keys = {1, 2};
  const Floats values = {10, 11, 20, 21};
  Bytes outcomes(2);
  ASSERT_EQ(
      recsdk_table_upsert(table_.get(), keys.data(), 2, values.data(), nullptr, outcomes.data()),
      RECSDK_OK);
  EXPECT_EQ(outcomes, Bytes(2, RECSDK_OUTCOME_INSERTED));
  EXPECT_EQ(lookup(keys), values);

  const Keys gone = {2, 2};
  ASSERT_EQ(recsdk_table_erase(table_.get(), gone.data(), 2, outcomes.data()), RECSDK_OK);
  EXPECT_EQ(outcomes, (Bytes{RECSDK_OUTCOME_FOUND, RECSDK_OUTCOME_MISSING}));
  EXPECT_EQ(size_of(table_.get()), 1);
  ASSERT_EQ(recsdk_table_clear(table_.get()), RECSDK_OK);
  EXPECT_EQ(size_of(table_.get()), 0);
  EXPECT_EQ(stats_of(table_.get()).erased, 2U);
}

TEST_F(CApiTest, UpsertsAndExportsState) {
  optimizer_ = default_optimizer(RECSDK_OPTIMIZER_ADAGRAD);
  const TableHandle table = make_table(config_);
  const Keys keys = {8, -8, 0};
  const Floats values = {1, 2, 3, 4, 5, 6};
  const Floats state = {.1F, .2F, .3F, .4F, .5F, .6F};
  ASSERT_EQ(recsdk_table_upsert(table.get(), keys.data(), 3, values.data(), state.data(), nullptr),
            RECSDK_OK);

  Keys exported(2);
  Floats weights(4);
  Floats exported_state(4);
  std::int64_t begin = 0;
  std::int64_t num_rows = 0;
  ASSERT_EQ(recsdk_table_export_rows(table.get(), &begin, 2, exported.data(), weights.data(),
                                     exported_state.data(), &num_rows),
            RECSDK_OK);
  EXPECT_EQ(num_rows, 2);
  EXPECT_EQ(exported, (Keys{8, -8}));
  EXPECT_EQ(weights, (Floats{1, 2, 3, 4}));
  EXPECT_EQ(exported_state, (Floats{.1F, .2F, .3F, .4F}));
  ASSERT_EQ(recsdk_table_export_rows(table.get(), &begin, 2, exported.data(), nullptr, nullptr,
                                     &num_rows),
            RECSDK_OK);
  EXPECT_EQ(num_rows, 1);
  EXPECT_EQ(exported[0], 0);
}

TEST_F(CApiTest, AppliesGradients) {
  insert({1, 2});
  const Keys keys = {1, 7, 1};
  const Floats gradients = {1, 2, 9, 9, 3, 4};
  Bytes outcomes(3);
  ASSERT_EQ(
      recsdk_table_apply_gradients(table_.get(), keys.data(), 3, gradients.data(), outcomes.data()),
      RECSDK_OK);
  EXPECT_EQ(outcomes, (Bytes{RECSDK_OUTCOME_FOUND, RECSDK_OUTCOME_MISSING, RECSDK_OUTCOME_FOUND}));
  EXPECT_EQ(lookup({1, 2, 7}), (Floats{-1, -2, 2, 2, 0, 0}));
}

TEST_F(CApiTest, MapsPoolsAndUpdates) {
  const Keys keys = {1, 2, 3};
  Keys rows(3);
  Bytes outcomes(3);
  ASSERT_EQ(
      recsdk_table_map(table_.get(), keys.data(), 3, 1, nullptr, rows.data(), outcomes.data()),
      RECSDK_OK);
  const Keys offsets = {0, 2, 2, 3};
  const Floats weights = {1, 2, 3};
  const recsdk_bags bags = {rows.data(),    outcomes.data(),    3, offsets.data(), 3,
                            weights.data(), RECSDK_POOLING_SUM, 0};
  Floats out(12, -1.0F);
  const recsdk_pool_block forward = {bags, out.data(), 4};
  ASSERT_EQ(recsdk_table_pool(table_.get(), &forward, 1), RECSDK_OK);
  EXPECT_EQ(out, (Floats{5, 5, -1, -1, 0, 0, -1, -1, 9, 9, -1, -1}));

  const Floats grad = {1, 1};
  Floats weights_grad(3);
  const recsdk_grad_block backward = {bags, grad.data(), 0, weights_grad.data()};
  ASSERT_EQ(recsdk_table_update(table_.get(), &backward, 1), RECSDK_OK);
  EXPECT_EQ(weights_grad, (Floats{2, 4, 6}));
  EXPECT_EQ(lookup(keys), (Floats{.5F, .5F, 1, 1, 1.5F, 1.5F}));
}

TEST_F(CApiTest, PoolsKeysWithoutOffsets) {
  const Keys keys = {1, 2};
  Keys rows(2);
  Bytes outcomes(2);
  ASSERT_EQ(
      recsdk_table_map(table_.get(), keys.data(), 2, 1, nullptr, rows.data(), outcomes.data()),
      RECSDK_OK);
  const recsdk_bags bags = {rows.data(), outcomes.data(),     2, nullptr, 2,
                            nullptr,     RECSDK_POOLING_MEAN, 0};
  Floats out(4);
  const recsdk_pool_block forward = {bags, out.data(), 2};
  ASSERT_EQ(recsdk_table_pool(table_.get(), &forward, 1), RECSDK_OK);
  EXPECT_EQ(out, (Floats{1, 1, 2, 2}));
}

TEST_F(CApiTest, LeasesHideABatchUntilTheyAreReleased) {
  const Keys keys = {1};
  Keys rows(1);
  Bytes outcomes(1);
  LeaseHandle lease = take_lease(table_.get(), 1, 7);
  int has_step = 0;
  std::int64_t step = 0;
  ASSERT_EQ(recsdk_lease_step(lease.get(), &has_step, &step), RECSDK_OK);
  EXPECT_TRUE(has_step);
  EXPECT_EQ(step, 7);
  ASSERT_EQ(
      recsdk_table_map(table_.get(), keys.data(), 1, 1, lease.get(), rows.data(), outcomes.data()),
      RECSDK_OK);
  EXPECT_EQ(size_of(table_.get()), 0);
  EXPECT_EQ(stats_of(table_.get()).num_rows_in_flight, 1);
  EXPECT_EQ(stats_of(table_.get()).num_rows_held_back, 0);
  lease.reset();
  EXPECT_EQ(size_of(table_.get()), 1);
}

TEST_F(CApiTest, ALeaseWithoutAStepHidesNothing) {
  const LeaseHandle lease = take_lease(table_.get(), 0, 7);
  int has_step = 1;
  std::int64_t step = 99;
  ASSERT_EQ(recsdk_lease_step(lease.get(), &has_step, &step), RECSDK_OK);
  EXPECT_FALSE(has_step);
  EXPECT_EQ(step, 99);
  insert({1});
  EXPECT_EQ(size_of(table_.get()), 1);
}

TEST_F(CApiTest, ALeaseMayOutliveItsTable) {
  const LeaseHandle lease = take_lease(table_.get(), 1, 0);
  table_.reset();
}

TEST_F(CApiTest, ReadsAndRestoresCounters) {
  float learning_rate = 0.0F;
  ASSERT_EQ(recsdk_table_set_learning_rate(table_.get(), 0.125F), RECSDK_OK);
  ASSERT_EQ(recsdk_table_learning_rate(table_.get(), &learning_rate), RECSDK_OK);
  EXPECT_EQ(learning_rate, 0.125F);

  std::uint64_t count = 0;
  ASSERT_EQ(recsdk_table_set_update_count(table_.get(), 41), RECSDK_OK);
  ASSERT_EQ(recsdk_table_apply_gradients(table_.get(), nullptr, 0, nullptr, nullptr), RECSDK_OK);
  ASSERT_EQ(recsdk_table_update_count(table_.get(), &count), RECSDK_OK);
  EXPECT_EQ(count, 42U);
}

TEST_F(CApiTest, ReportsSizesAndInvariants) {
  ASSERT_EQ(recsdk_table_reserve(table_.get(), 1000), RECSDK_OK);
  insert({1, 2, 2});
  const recsdk_stats stats = stats_of(table_.get());
  EXPECT_EQ(stats.num_rows, 2);
  EXPECT_EQ(stats.outcomes[RECSDK_OUTCOME_INSERTED], 2U);
  EXPECT_EQ(stats.outcomes[RECSDK_OUTCOME_FOUND], 1U);
  EXPECT_GE(stats.index_slots, 2);
  std::int64_t bytes = 0;
  ASSERT_EQ(recsdk_table_memory_bytes(table_.get(), &bytes), RECSDK_OK);
  EXPECT_EQ(bytes, stats.index_bytes + stats.row_bytes + stats.metadata_bytes);
  EXPECT_EQ(recsdk_table_check_invariants(table_.get()), RECSDK_OK);
}

TEST_F(CApiTest, EmptyCallsMayPassNullArrays) {
  recsdk_table* t = table_.get();
  EXPECT_EQ(recsdk_table_map(t, nullptr, 0, 1, nullptr, nullptr, nullptr), RECSDK_OK);
  EXPECT_EQ(recsdk_table_lookup(t, nullptr, 0, nullptr, nullptr), RECSDK_OK);
  EXPECT_EQ(recsdk_table_find_or_insert(t, nullptr, 0, nullptr, nullptr, nullptr), RECSDK_OK);
  EXPECT_EQ(recsdk_table_upsert(t, nullptr, 0, nullptr, nullptr, nullptr), RECSDK_OK);
  EXPECT_EQ(recsdk_table_erase(t, nullptr, 0, nullptr), RECSDK_OK);
  EXPECT_EQ(recsdk_table_pool(t, nullptr, 0), RECSDK_OK);
  EXPECT_EQ(recsdk_table_update(t, nullptr, 0), RECSDK_OK);
  EXPECT_EQ(recsdk_map_tables(nullptr, 0), RECSDK_OK);
  EXPECT_EQ(recsdk_pool_tables(nullptr, 0), RECSDK_OK);
  EXPECT_EQ(recsdk_update_tables(nullptr, 0), RECSDK_OK);
  const std::int64_t offset = 0;
  const recsdk_bags bags = {nullptr, nullptr, 0, &offset, 0, nullptr, RECSDK_POOLING_SUM, 0};
  const recsdk_pool_block block = {bags, nullptr, 0};
  EXPECT_EQ(recsdk_table_pool(t, &block, 1), RECSDK_OK);
}

TEST_F(CApiTest, CallsOverManyTablesEqualSingleCalls) {
  const TableHandle other = make_table(config_);
  const std::array<recsdk_table*, 2> tables = {table_.get(), other.get()};
  const std::array<Keys, 2> keys = {Keys{1, 2}, Keys{-3}};
  std::array<Keys, 2> rows = {Keys(2), Keys(1)};
  std::array<Bytes, 2> outcomes = {Bytes(2), Bytes(1)};
  std::array<Floats, 2> out = {Floats(4), Floats(2)};
  const Floats grad = {2, 4};

  std::vector<recsdk_map_call> maps;
  std::vector<recsdk_pool_block> pool_blocks;
  std::vector<recsdk_grad_block> grad_blocks;
  for (std::size_t t = 0; t < 2; ++t) {
    const std::int64_t n = std::ssize(keys[t]);
    maps.push_back(
        {tables[t], keys[t].data(), n, nullptr, rows[t].data(), outcomes[t].data(), 1, 0});
    const recsdk_bags bags = {rows[t].data(), outcomes[t].data(), n, nullptr, n,
                              nullptr,        RECSDK_POOLING_SUM, 0};
    pool_blocks.push_back({bags, out[t].data(), 2});
    grad_blocks.push_back({bags, grad.data(), 0, nullptr});
  }
  ASSERT_EQ(recsdk_map_tables(maps.data(), 2), RECSDK_OK);
  const std::array<recsdk_pool_call, 2> pools = {
      {{tables[0], &pool_blocks[0], 1}, {tables[1], &pool_blocks[1], 1}}};
  ASSERT_EQ(recsdk_pool_tables(pools.data(), 2), RECSDK_OK);
  EXPECT_EQ(out[0], (Floats{1, 1, 2, 2}));
  EXPECT_EQ(out[1], (Floats{-3, -3}));
  const std::array<recsdk_update_call, 2> updates = {
      {{tables[0], &grad_blocks[0], 1}, {tables[1], &grad_blocks[1], 1}}};
  ASSERT_EQ(recsdk_update_tables(updates.data(), 2), RECSDK_OK);
  EXPECT_EQ(lookup({1, 2}), (Floats{0, -1, 1, 0}));
}

}  // namespace
}  // namespace recsdk::test::c_api_test
