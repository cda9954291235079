// Every setting of a table with every other, two at a time: with other threads and another hash
// seed, saved and restored, row by row, and in a device's memory a table answers alike.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "crossing_program.h"
#include "saving_tables.h"

namespace recsdk::test::crossing_test {
namespace {

constexpr std::int64_t kDeviceRows = 5000;  // more than a round inserts

/// Threads of the pool for a scope.
class ThreadScope {
 public:
  explicit ThreadScope(int count) : before_(num_threads()) { set_num_threads(count); }
  ~ThreadScope() { set_num_threads(before_); }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int before_;
};

bool any(const TableConfig&) { return true; }

const std::vector<Choices>& rows_of_tables() {
  static const std::vector<Choices> rows = combinations(any);
  return rows;
}

const std::vector<Choices>& rows_of_devices() {
  static const std::vector<Choices> rows = combinations(is_of_devices);
  return rows;
}

/// The config with another number of threads and another hash seed, which alter nothing.
TableConfig otherwise(TableConfig config) {
  config.num_threads = config.num_threads == 1 ? 3 : 1;
  config.hash_seed = 99;
  return config;
}

void expect_same(const Transcript& got, const Transcript& wanted, const char* what) {
  EXPECT_TRUE(got.words == wanted.words) << what << ": outcomes differ";
  EXPECT_TRUE(bits_equal(got.values, wanted.values)) << what;
}

void expect_same_rows(const Table& got, const Table& wanted, const char* what) {
  EXPECT_TRUE(by_key(visible_rows(got)) == by_key(visible_rows(wanted))) << what << ": rows differ";
  EXPECT_EQ(got.update_count(), wanted.update_count()) << what;
  EXPECT_EQ(got.log_decay(), wanted.log_decay()) << what;
  EXPECT_TRUE(bits_equal(got.shared_rows().weights, wanted.shared_rows().weights)) << what;
  EXPECT_TRUE(bits_equal(got.shared_rows().state, wanted.shared_rows().state)) << what;
}

void expect_same_stats(const Table& got, const Table& wanted) {
  const TableStats a = got.stats();
  const TableStats b = wanted.stats();
  for (int o = 0; o < kNumOutcomes; ++o) EXPECT_EQ(a.outcomes[o], b.outcomes[o]) << "outcome " << o;
  EXPECT_EQ(a.num_rows, b.num_rows);
  EXPECT_EQ(a.num_rows_in_flight, 0);
  EXPECT_EQ(a.erased, b.erased);
  EXPECT_EQ(a.nonfinite, b.nonfinite);
}

// ---- tables ------------------------------------------------------------------------------------

void run(const Combination& row) {
  const std::int64_t dim = row.table.dim;
  Table table(row.table);
  Table other(otherwise(row.table));
  const auto both = [&](const Round& round) {
    expect_same(go_on(table, round), go_on(other, round), "other threads");
    expect_same_stats(table, other);
  };
  both(Round(dim, 1));
  BesideRows beside;
  std::vector<Bytes> files = {save(table, false, 1, &beside)};
  if (row.with_changes) {
    both(Round(dim, 2));
    files.push_back(save(table, true, 2, &beside));
  }
  Table restored(otherwise(row.table));
  if (row.into_used) go_on(restored, Round(dim, 3));
  Restore restore(restored);
  for (const Bytes& file : files) add(restore, file);
  if (row.table.admission) restore.add_records(beside.counts);
  if (beside.shared) {
    const SharedRows& rows = *beside.shared;
    restore.add_shared(rows.keys, rows.weights.data(), rows.state.data());
  }
  restore.commit(table.update_count(), table.log_decay(), beside.eviction);
  restored.check_invariants();
  expect_same_rows(restored, table, "restored");
  const Round last(dim, 4);
  const Transcript wanted = go_on(table, last);
  expect_same(go_on(other, last), wanted, "other threads at last");
  expect_same(go_on(restored, last), wanted, "restored and gone on");
  expect_same_rows(restored, table, "restored and gone on");
  expect_same_rows(other, table, "other threads at last");
}

TEST(Crossing, TablesAnswerAlikeWithOtherThreadsAndWhenRestored) {
  const ThreadScope threads(4);
  for (const Choices& choices : rows_of_tables()) {
    SCOPED_TRACE(title_of(choices));
    const Combination row = made_of(choices);
    const IsaScope isa(row.isa);
    ASSERT_NO_THROW(run(row));
    if (HasFailure()) return;  // the first is enough to read
  }
}

/// The places of the keys of each part: all occurrences of a few keys.
std::vector<std::vector<std::size_t>> parts_of(const std::vector<Key>& keys) {
  constexpr std::size_t kKeysOfAPart = 25;  // fewer than are fetched ahead
  std::map<Key, std::size_t> numbers;
  std::vector<std::vector<std::size_t>> parts;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t part = numbers.emplace(keys[i], numbers.size()).first->second / kKeysOfAPart;
    if (part == parts.size()) parts.emplace_back();
    parts[part].push_back(i);
  }
  return parts;
}

/// Trains a table on the keys at some places, with a bad gradient in the second update.
void train_places(Table& table, const Round& round, const std::vector<std::size_t>& places,
                  bool skips_bad) {
  std::vector<Key> keys;
  std::vector<float> good;
  std::vector<float> bad;
  for (const std::size_t place : places) {
    keys.push_back(round.keys[place]);
    for (std::size_t d = round.floats(place); d < round.floats(place + 1); ++d) {
      good.push_back(round.gradients[d]);
      bad.push_back(round.bad[d]);
    }
  }
  std::vector<float> values(good.size());
  table.find_or_insert(keys, values.data());
  table.apply_gradients(keys, good.data());
  if (!skips_bad) {
    table.apply_gradients(keys, bad.data());
  } else if (places.size() == round.keys.size()) {
    EXPECT_THROW(table.apply_gradients(keys, bad.data()), Error);
  }
  table.apply_gradients(keys, good.data());
}

TEST(Crossing, ATableIsTheSumOfSmallOnes) {
  const ThreadScope threads(4);
  for (const Choices& choices : rows_of_tables()) {
    SCOPED_TRACE(title_of(choices));
    Combination row = made_of(choices);
    const IsaScope isa(row.isa);
    row.table.max_rows.reset();
    row.table.eviction_groups.reset();
    row.table.owned_groups.reset();
    row.table.eviction.reset();
    row.table.admission.reset();  // draws depend on the step
    const bool raises = row.table.on_nonfinite == NonFinite::kRaise;
    const Round round(row.table.dim, 5);
    std::vector<std::size_t> all(round.keys.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    Table whole(row.table);
    train_places(whole, round, all, raises);
    std::map<Key, std::string> rows;
    for (const std::vector<std::size_t>& places : parts_of(round.keys)) {
      Table part(row.table);
      train_places(part, round, places, raises);
      rows.merge(by_key(visible_rows(part)));
    }
    ASSERT_TRUE(rows == by_key(visible_rows(whole)));
  }
}

// ---- device tables -----------------------------------------------------------------------------

class DeviceCrossing : public DeviceTest {
 protected:
  DeviceTable make(const TableConfig& config) const { return {config, options(kDeviceRows)}; }
  void run(const Combination& row);
};

INSTANTIATE_TEST_SUITE_P(Backends, DeviceCrossing, ::testing::ValuesIn(device_cases()), name_of);

bool is_close(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b || std::abs(a - b) <= 1e-4F * std::max(1.0F, std::abs(b));
}

void expect_close_to(const Transcript& got, const Transcript& wanted) {
  EXPECT_TRUE(got.words == wanted.words) << "outcomes differ";
  ASSERT_EQ(got.values.size(), wanted.values.size());
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    ASSERT_TRUE(is_close(got.values[i], wanted.values[i]))
        << "value " << i << ": " << got.values[i] << " against " << wanted.values[i];
  }
}

/// All rows of a table in the order of their numbers.
struct AllRows {
  explicit AllRows(const DeviceTable& table)
      : keys(static_cast<std::size_t>(table.size())),
        weights(keys.size() * static_cast<std::size_t>(table.layout().dim)),
        state(keys.size() * static_cast<std::size_t>(table.layout().state_width())) {
    RowNumber begin = 0;
    const std::int64_t n = table.size();
    EXPECT_EQ(table.export_rows(begin, {n, keys.data(), weights.data(), state.data()}), n);
  }

  std::vector<Key> keys;
  std::vector<float> weights;
  std::vector<float> state;
};

void DeviceCrossing::run(const Combination& row) {
  const std::int64_t dim = row.table.dim;
  DeviceTable table = make(row.table);
  DeviceTable other = make(otherwise(row.table));
  Table host(row.table);
  const Round first(dim, 1);
  const Transcript said = go_on(table, first);
  expect_same(go_on(other, first), said, "other threads");
  expect_close_to(said, go_on(Peer{host}, first));
  DeviceTable copy = make(otherwise(row.table));
  if (row.into_used) {
    go_on(copy, Round(dim, 3));
    copy.clear();
  }
  const AllRows rows(table);
  copy.upsert(rows.keys, rows.weights.data(), rows.state.data());
  copy.set_update_count(table.update_count());
  const Round last(dim, 4);
  const Transcript wanted = go_on(table, last);
  expect_same(go_on(other, last), wanted, "other threads at last");
  expect_same(go_on(copy, last), wanted, "copied and gone on");
  expect_close_to(wanted, go_on(Peer{host}, last));
}

TEST_P(DeviceCrossing, DeviceTablesAnswerAsTablesDo) {
  const ThreadScope threads(4);
  for (const Choices& choices : rows_of_devices()) {
    SCOPED_TRACE(title_of(choices));
    const Combination row = made_of(choices);
    const IsaScope isa(row.isa);
    ASSERT_NO_THROW(run(row));
    if (HasFailure()) return;
  }
}

TEST_P(DeviceCrossing, WhatADeviceTableHasNotIsRefused) {
  for (const Choices& choices : rows_of_tables()) {
    SCOPED_TRACE(title_of(choices));
    const TableConfig config = made_of(choices).table;
    if (is_of_devices(config)) {
      EXPECT_NO_THROW(make(config));
    } else {
      EXPECT_THROW(make(config), std::invalid_argument);
    }
  }
}

// ---- nothing is left out -----------------------------------------------------------------------

TEST(Crossing, WhatDoesNotGoTogetherIsRefused) {
  int num_refused = 0;
  for (const Value& optimizer : optimizers()) {
    for (const Value& decay : decays()) {
      Combination row;
      row.table.dim = 3;
      optimizer.set(row);
      decay.set(row);
      if (is_legal(row.table.optimizer)) continue;
      ++num_refused;
      EXPECT_THROW(Table{row.table}, std::invalid_argument) << optimizer.name << " " << decay.name;
      EXPECT_THROW(DeviceTable(row.table, {.backend = "cpu", .device = 0, .max_device_rows = 9}),
                   std::invalid_argument);
    }
  }
  EXPECT_GT(num_refused, 10);
}

/// Expects that each field has a value other than by default in some of the configs.
template <typename Config>
void expect_all_crossed(const std::vector<Config>& configs) {
  const auto plain = fields_of(Config());
  [&]<std::size_t... kField>(std::index_sequence<kField...>) {
    const auto expect_crossed = [&](auto field) {
      EXPECT_TRUE(std::any_of(configs.begin(), configs.end(),
                              [&](const Config& config) {
                                return std::get<field>(fields_of(config)) != std::get<field>(plain);
                              }))
          << "field " << field << " has one value only";
    };
    (expect_crossed(std::integral_constant<std::size_t, kField>{}), ...);
  }(std::make_index_sequence<std::tuple_size_v<decltype(plain)>>{});
}

TEST(Crossing, EveryFieldIsCrossed) {
  std::vector<TableConfig> tables;
  std::vector<OptimizerConfig> of_optimizers;
  std::vector<InitializerConfig> of_initializers;
  for (const Choices& choices : rows_of_tables()) {
    tables.push_back(made_of(choices).table);
    of_optimizers.push_back(tables.back().optimizer);
    of_initializers.push_back(tables.back().initializer);
  }
  expect_all_crossed(tables);
  expect_all_crossed(of_optimizers);
  expect_all_crossed(of_initializers);
}

/// Expects that each value of an enum that a table takes is crossed, and no other.
template <typename Enum, typename Field>
void expect_whole_enum(Field field) {
  std::set<int> crossed;
  std::set<int> taken;
  for (const Choices& choices : rows_of_tables())
    crossed.insert(static_cast<int>(field(made_of(choices).table)));
  for (int value = 0; value < 256; ++value) {
    TableConfig config;
    config.dim = 3;
    config.initializer.callback = [](std::span<const Key>, float*) {};
    if (std::is_same_v<Enum, BiasCorrection>) config.optimizer = OptimizerConfig::adam();
    field(config) = static_cast<Enum>(value);
    try {
      const Table table(config);
      taken.insert(value);
    } catch (const std::invalid_argument&) {
      continue;
    }
  }
  EXPECT_EQ(crossed, taken);
}

TEST(Crossing, EveryValueOfEveryEnumIsCrossed) {
  expect_whole_enum<OptimizerKind>([](auto&& c) -> auto& { return c.optimizer.kind; });
  expect_whole_enum<BiasCorrection>([](auto&& c) -> auto& { return c.optimizer.bias_correction; });
  expect_whole_enum<WeightDecay>([](auto&& c) -> auto& { return c.optimizer.weight_decay_mode; });
  expect_whole_enum<InitializerKind>([](auto&& c) -> auto& { return c.initializer.kind; });
  expect_whole_enum<OnFull>([](auto&& c) -> auto& { return c.on_full; });
  expect_whole_enum<NonFinite>([](auto&& c) -> auto& { return c.on_nonfinite; });
  expect_whole_enum<DType>([](auto&& c) -> auto& { return c.weight_dtype; });
  expect_whole_enum<Rounding>([](auto&& c) -> auto& { return c.rounding; });
}

TEST(Crossing, EveryLegalPairIsInACombination) {
  const std::vector<std::size_t> sizes = {2, 3, 2};
  const auto rule = [](const Choices& c) { return !(c[0] == 1 && c[1] == 2); };
  std::set<std::string> pairs;
  for (const Choices& row : Covering(sizes, rule).combinations()) {
    EXPECT_TRUE(rule(row));
    for (std::size_t a = 0; a < 3; ++a) {
      for (std::size_t b = a + 1; b < 3; ++b)
        pairs.insert(std::to_string(a * 1000 + *row[a] * 100 + b * 10 + *row[b]));
    }
  }
  EXPECT_EQ(pairs.size(), 6U + 4U + 6U - 1U);
}

}  // namespace
}  // namespace recsdk::test::crossing_test
