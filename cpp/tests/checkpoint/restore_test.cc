// Restores: which rows are kept, what is refused, and that a table changes as a whole or not at
// all.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "recsdk/recsdk.h"
#include "saving_tables.h"
#include "table/table_impl.h"

namespace recsdk::test::restore_test {
namespace {

std::vector<Key> range(Key first, std::size_t n) {
  std::vector<Key> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config(std::int64_t dim = 4,
                   const OptimizerConfig& optimizer = OptimizerConfig::adagrad(0.1F)) {
  TableConfig config;
  config.name = "user";
  config.dim = dim;
  config.optimizer = optimizer;
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  return config;
}

void fill(Table& table, Key first, std::size_t n) {
  std::vector<float> values(n * static_cast<std::size_t>(table.layout().dim), 0.25F);
  table.find_or_insert(range(first, n), values.data());
  table.apply_gradients(range(first, n), values.data());
}

/// The message of the CheckpointError that adding these files gives.
std::string refusal(const Table& table, const std::vector<Bytes>& files,
                    const RestoreOptions& options = {}) {
  Restore restore(table);
  try {
    for (const Bytes& file : files) add(restore, file, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCheckpoint);
    EXPECT_THROW(restore.commit(0), std::invalid_argument);
    return error.what();
  }
  ADD_FAILURE() << "the files were taken";
  return "";
}

class RestoreTest : public testing::Test {
 protected:
  RestoreTest() { fill(source_, -500, 1000); }

  Table source_{config()};
};

TEST_F(RestoreTest, RowsAndStateAreTheSameBits) {
  const Bytes file = save(source_);
  Table copy(config());
  fill(copy, 5000, 70);
  Restore restore(copy);
  add(restore, file);
  EXPECT_EQ(restore.num_rows(), 1000);
  EXPECT_EQ(copy.size(), 70);
  EXPECT_FALSE(copy.is_tracking());
  restore.commit(41);
  EXPECT_EQ(visible_rows(copy), visible_rows(source_));
  EXPECT_EQ(copy.update_count(), 41U);
  EXPECT_TRUE(copy.is_tracking());
  EXPECT_THROW(restore.commit(41), std::invalid_argument);
  copy.check_invariants();
}

TEST_F(RestoreTest, ATableWithoutRowsComesBackEmpty) {
  Table empty(config());
  const Bytes file = save(empty);
  restore_into(source_, {file});
  EXPECT_EQ(source_.size(), 0);
  EXPECT_EQ(save(source_, true), save(source_, true));
}

TEST_F(RestoreTest, RanksKeepWhatTheyOwn) {
  const Bytes file = save(source_);
  for (const std::int64_t world : {1, 2, 3, 8}) {
    std::map<Key, std::string> all;
    std::map<Key, std::string> all_by_modulo;
    for (std::int64_t rank = 0; rank < world; ++rank) {
      std::vector<std::uint8_t> owned(kNumVirtualShards);
      for (std::int64_t v = 0; v < kNumVirtualShards; ++v)
        owned[static_cast<std::size_t>(v)] = v * world / kNumVirtualShards == rank;
      Table part(config());
      restore_into(part, {file}, {.owned = owned, .modulo = {}, .drop_state = false});
      for (const auto& row : by_key(visible_rows(part))) {
        EXPECT_EQ(virtual_shard(row.first) * world / kNumVirtualShards, rank);
        EXPECT_TRUE(all.insert(row).second);
      }
      restore_into(part, {file},
                   {.owned = {}, .modulo = RestoreOptions::Modulo{rank, world}, .drop_state = {}});
      for (const auto& row : by_key(visible_rows(part))) all_by_modulo.insert(row);
    }
    EXPECT_EQ(all, by_key(visible_rows(source_)));
    EXPECT_EQ(all_by_modulo, all);
  }
}

TEST_F(RestoreTest, SeveralFilesOfOneSaveAreOne) {
  Table other(config());
  fill(other, 2000, 300);
  const std::vector<Bytes> files = {save(source_), save(other)};
  Table copy(config());
  restore_into(copy, files);
  EXPECT_EQ(copy.size(), 1300);
}

TEST_F(RestoreTest, KeysThatComeTwiceInOneSaveAreRefused) {
  Table other(config());
  fill(other, 499, 1);
  const Table copy(config());
  EXPECT_NE(refusal(copy, {save(source_), save(other)}).find("key 499 a second time"),
            std::string::npos);
}

TEST_F(RestoreTest, AKeyThatIsARowAndErasedIsRefused) {
  MemorySink sink;
  RowFileHeader header{RowFileKind::kDelta, 1, {9}, {{"weight", FieldType::kFloat32, 1}}};
  RowFileWriter writer(sink, header);
  const Key key = 5;
  const float weight = 1.0F;
  const void* const fields[] = {&weight};
  writer.write_rows({&key, 1}, fields);
  writer.write_erased({&key, 1});
  writer.finish();
  const Table table(config(1, OptimizerConfig::sgd()));
  EXPECT_NE(refusal(table, {sink.content}).find("both as a row and as erased"), std::string::npos);
}

TEST_F(RestoreTest, SnapshotsOfTwoSavesAreRefused) {
  const Table copy(config());
  EXPECT_NE(refusal(copy, {save(source_, false, 1), save(source_, false, 2)}).find("another save"),
            std::string::npos);
  const Bytes full = save(source_, false, 3);
  const Bytes delta = save(source_, true, 3);
  EXPECT_NE(refusal(copy, {full, delta}).find("a token of its own"), std::string::npos);
}

TEST_F(RestoreTest, AKeyThatLeftAndCameBackIsNew) {
  const Bytes full = save(source_, false, 1);
  source_.erase(range(0, 10));
  fill(source_, 5, 2);
  const Bytes delta = save(source_, true, 2);
  EXPECT_EQ(read_all(open(delta)).erased, (std::vector<Key>{0, 1, 2, 3, 4, 7, 8, 9}));
  Table copy(config());
  restore_into(copy, {full, delta});
  EXPECT_EQ(by_key(visible_rows(copy)), by_key(visible_rows(source_)));
}

TEST_F(RestoreTest, ADeltaAfterClearingSaysThatAllKeysLeft) {
  const Bytes full = save(source_, false, 1);
  source_.clear();
  fill(source_, 499, 2);
  const Bytes delta = save(source_, true, 2);
  EXPECT_EQ(read_all(open(delta)).erased, range(-500, 999));
  Table copy(config());
  restore_into(copy, {full, delta});
  EXPECT_EQ(by_key(visible_rows(copy)), by_key(visible_rows(source_)));
}

// ---- what does not fit --------------------------------------------------------------------------

TEST_F(RestoreTest, AnotherWidthIsRefusedNamingBoth) {
  const std::string message = refusal(Table(config(8)), {save(source_)});
  EXPECT_NE(message.find("width 4"), std::string::npos) << message;
  EXPECT_NE(message.find("are 8 wide"), std::string::npos) << message;
}

TEST_F(RestoreTest, AnotherOptimizerIsRefusedNamingBothUnlessStateIsDropped) {
  const Bytes file = save(source_);
  Table table(config(4, OptimizerConfig::adam()));
  const std::string message = refusal(table, {file});
  EXPECT_NE(message.find("sum float32[4]"), std::string::npos) << message;
  EXPECT_NE(message.find("exp_avg_sq float32[4]"), std::string::npos) << message;
  restore_into(table, {file}, {.owned = {}, .modulo = {}, .drop_state = true});
  EXPECT_EQ(table.size(), 1000);
  const std::map<Key, std::string> weights = by_key(visible_rows(source_));
  for (const auto& [key, values] : by_key(visible_rows(table))) {
    EXPECT_EQ(values.substr(0, 16), weights.at(key).substr(0, 16));
    EXPECT_EQ(values.substr(16), std::string(32, '\0'));
  }
}

TEST_F(RestoreTest, DroppedStateIsThatOfNewRows) {
  OptimizerConfig optimizer = OptimizerConfig::adagrad(0.1F);
  optimizer.initial_accumulator_value = 0.5F;
  Table table(config(4, optimizer));
  restore_into(table, {save(source_)}, {.owned = {}, .modulo = {}, .drop_state = true});
  for (const FileRow& row : visible_rows(table)) {
    float sum = 0.0F;
    std::memcpy(&sum, row.values.data() + 16, sizeof(sum));
    EXPECT_EQ(sum, 0.5F);
  }
}

TEST_F(RestoreTest, WeightsOfAnotherTypeAreRefused) {
  MemorySink sink;
  RowFileHeader header{RowFileKind::kSnapshot, 4, {}, {{"weight", FieldType::kFloat16, 4}}};
  RowFileWriter(sink, header).finish();
  EXPECT_NE(refusal(Table(config()), {sink.content}).find("float16"), std::string::npos);
}

TEST_F(RestoreTest, MoreRowsThanMaxRowsAreRefusedAtTheEnd) {
  TableConfig small = config();
  small.max_rows = 999;
  Table table(small);
  fill(table, 0, 3);
  Restore restore(table);
  add(restore, save(source_));
  try {
    restore.commit(0);
    FAIL() << "the rows were taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCapacity);
    EXPECT_NE(std::string(error.what()).find("1000 rows, and max_rows is 999"), std::string::npos);
  }
  EXPECT_EQ(table.size(), 3);
}

TEST_F(RestoreTest, NothingIsReplacedWhileLeasesOrACutAreOpen) {
  Restore restore(source_);
  add(restore, save(source_));
  const auto is_busy = [&] {
    try {
      restore.commit(0);
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::kBusy;
    }
  };
  {
    const Lease lease = source_.lease();
    EXPECT_TRUE(is_busy());
  }
  {
    const Cut cut = source_.cut({});
    EXPECT_TRUE(is_busy());
  }
  restore.commit(7);
  EXPECT_EQ(source_.update_count(), 7U);
}

TEST_F(RestoreTest, CheckingFailsAsCommittingWould) {
  Restore restore(source_);
  add(restore, save(source_));
  {
    const Lease lease = source_.lease();
    EXPECT_THROW(restore.check(0), Error);
  }
  EXPECT_THROW(restore.check(~std::uint64_t{0}), std::invalid_argument);
  EXPECT_THROW(restore.check(0, -1.0), std::invalid_argument);
  restore.check(0);
  EXPECT_EQ(restore.num_rows(), 1000);
  restore.commit(0);
  EXPECT_THROW(restore.check(0), std::invalid_argument);
  TableConfig small = config();
  small.max_rows = 999;
  const Table table(small);
  Restore many(table);
  add(many, save(source_));
  EXPECT_THROW(many.check(0), Error);
}

// ---- rows from memory ---------------------------------------------------------------------------

TEST_F(RestoreTest, RowsFromMemoryAreAsThoseOfAFile) {
  Table copy(config());
  fill(copy, 5000, 70);
  Restore restore(copy);
  RowFileReader file = open(save(source_));
  RowBlock block;
  std::vector<const void*> fields(2);
  while (file.next(block)) {
    std::copy(block.fields.begin(), block.fields.end(), fields.begin());
    restore.add_rows(block.keys, fields);
  }
  EXPECT_EQ(restore.num_rows(), 1000);
  restore.commit(41);
  EXPECT_EQ(visible_rows(copy), visible_rows(source_));
  copy.check_invariants();
}

TEST_F(RestoreTest, RowsFromMemoryThatMakeNoSenseAreRefused) {
  const std::vector<float> weights(8, 1.0F);
  const std::vector<Key> twice = {7, 7};
  const std::vector<const void*> fields(2, weights.data());
  const Table copy(config());
  Restore restore(copy);
  EXPECT_THROW(restore.add_rows(twice, std::span(fields).first(1)), std::invalid_argument);
  restore.add_rows(std::span(twice).first(1), fields);
  EXPECT_THROW(restore.add_rows(std::span(twice).last(1), fields), Error);
  EXPECT_THROW(restore.commit(0), std::invalid_argument);
  Restore after_file(copy);
  add(after_file, save(source_));
  EXPECT_THROW(after_file.add_rows({}, fields), std::invalid_argument);
}

TEST_F(RestoreTest, RunsOfRowsEndWithTheirSlab) {
  constexpr std::int64_t kDim = 1 << 14;  // slabs of 512 rows
  const TableConfig wide = config(kDim, OptimizerConfig::rowwise_adagrad(0.1F));
  Table table(wide);
  table.find_or_insert(range(0, 600), std::vector<float>(600 * kDim).data());
  table.erase(range(100, 50));
  table.find_or_insert(range(-50, 25), std::vector<float>(25 * kDim).data());
  Cut cut = table.cut({});
  MemorySink sink;
  write_rows(cut, sink, {});
  cut.finish(true);
  Table copy(wide);
  restore_into(copy, {sink.content});
  EXPECT_EQ(visible_rows(copy), visible_rows(table));
}

TEST_F(RestoreTest, ArgumentsThatMakeNoSenseAreRefused) {
  const Bytes file = save(source_);
  Restore restore(source_);
  const std::vector<std::uint8_t> few(10);
  EXPECT_THROW(add(restore, file, {.owned = few, .modulo = {}, .drop_state = false}),
               std::invalid_argument);
  for (const auto& [rank, world] : {std::pair<std::int64_t, std::int64_t>{-1, 2}, {2, 2}, {0, 0}})
    EXPECT_THROW(
        add(restore, file,
            {.owned = {}, .modulo = RestoreOptions::Modulo{rank, world}, .drop_state = {}}),
        std::invalid_argument);
  RowFileReader reader = open(file);
  RowBlock block;
  reader.next(block);
  EXPECT_THROW(restore.add_file(reader), std::invalid_argument);
  add(restore, file);  // mistakes of the caller have done no harm
  EXPECT_THROW(restore.commit(~std::uint64_t{0}), std::invalid_argument);
  EXPECT_THROW(restore.commit(0, -1.0), std::invalid_argument);
  restore.commit(0);
  EXPECT_THROW(add(restore, file), std::invalid_argument);
}

// What says how many rows come may lie: memory is taken for those that are there.
TEST_F(RestoreTest, MemoryFollowsTheRowsThatAreThere) {
  const Bytes file = save(source_);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t claim : {std::int64_t{1'000'000'000}, kMost - 1024, kMost}) {
    for (const int num_threads : {1, 2}) {
      TableConfig of_copy = config();
      of_copy.num_threads = num_threads;
      Table copy(of_copy);
      RowFileReader reader(std::make_shared<MemorySource>(file), std::ssize(file), "lying",
                           {.max_rows = claim, .in_background = false});
      Restore restore(copy);
      restore.add_file(reader);
      restore.commit(1);
      EXPECT_EQ(copy.size(), 1000);
      EXPECT_LT(copy.stats().index_bytes, 4 << 20);
    }
  }
}

TEST_F(RestoreTest, ADamagedFileLeavesTheTableAsItWas) {
  Bytes file = save(source_);
  file[file.size() / 2] ^= std::byte{1};
  Table table(config());
  fill(table, 0, 3);
  const std::vector<FileRow> before = visible_rows(table);
  EXPECT_NE(refusal(table, {file}).find("checksum"), std::string::npos);
  EXPECT_EQ(visible_rows(table), before);
}

// ---- cuts alone ---------------------------------------------------------------------------------

TEST_F(RestoreTest, ChangesAloneNeedASaveBefore) {
  EXPECT_THROW((void)source_.cut({.changes_only = true, .max_copy_bytes = {}}),
               std::invalid_argument);
  EXPECT_THROW((void)source_.cut({.changes_only = false, .max_copy_bytes = -1}),
               std::invalid_argument);
  {
    const Cut cut = source_.cut({});
  }
  EXPECT_FALSE(source_.is_tracking());
  save(source_);
  EXPECT_TRUE(source_.is_tracking());
  EXPECT_GT(source_.stats().tracking_bytes, 0);
}

TEST_F(RestoreTest, RowsThatWereReadAreNotCopied) {
  Table table(config(600));
  fill(table, 0, 1500);
  Cut cut = table.cut({});
  const std::vector<float> gradient(600, 1.0F);
  int num_writes = 0;
  MemorySink sink([&] {
    if (++num_writes < 5) return;
    table.apply_gradients(range(0, 1), gradient.data());
    EXPECT_EQ(cut.copied_bytes(), 0);
  });
  WriteOptions options;
  options.file = tiny_blocks();
  write_rows(cut, sink, options);
  EXPECT_GT(num_writes, 1000);
  EXPECT_EQ(cut.max_copied_bytes(), 0);
}

TEST_F(RestoreTest, CopiesAreFreedAsTheReaderPasses) {
  Table table(config(600));
  fill(table, 0, 1500);
  Cut cut = table.cut({});
  const std::vector<float> gradients(1500 * 600, 1.0F);
  table.apply_gradients(range(0, 1500), gradients.data());
  const std::int64_t all = cut.copied_bytes();
  EXPECT_GT(all, 1500 * 4800);
  std::int64_t last = all;
  MemorySink sink([&] {
    EXPECT_LE(cut.copied_bytes(), last);
    last = cut.copied_bytes();
  });
  WriteOptions options;
  options.file = tiny_blocks();
  write_rows(cut, sink, options);
  EXPECT_EQ(last, 0);
  EXPECT_EQ(cut.max_copied_bytes(), all);
}

TEST_F(RestoreTest, CopiesOfFewWideRowsKeepTheirPlace) {
  Table table(config(4000));  // copies are kept by 32 rows, marks by 64
  fill(table, 0, 100);
  save(table);
  const std::vector<float> gradients(3 * 4000, 1.0F);
  table.apply_gradients(std::vector<Key>{0, 35, 40}, gradients.data());
  Cut cut = table.cut({.changes_only = true, .max_copy_bytes = {}});
  table.apply_gradients(std::vector<Key>{35}, gradients.data());
  MemorySink sink;
  write_rows(cut, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
  std::vector<Key> keys;
  for (const FileRow& row : read_all(open(sink.content)).rows) keys.push_back(row.key);
  EXPECT_EQ(keys, (std::vector<Key>{0, 35, 40}));
}

TEST_F(RestoreTest, ProgressIsReportedAndMayEndTheCall) {
  std::vector<std::int64_t> seen;
  Cut cut = source_.cut({});
  MemorySink sink;
  WriteOptions options;
  options.file = tiny_blocks();
  options.progress = [&](std::int64_t num_bytes) {
    seen.push_back(num_bytes);
    if (seen.size() == 4) throw std::runtime_error("enough");
  };
  EXPECT_THROW(write_rows(cut, sink, options), std::runtime_error);
  EXPECT_EQ(seen.size(), 4U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_TRUE(cut.is_finished());
}

TEST_F(RestoreTest, ACutEndsWithinAnInitializer) {
  std::optional<Cut> cut;
  TableConfig custom = config();
  custom.initializer = InitializerConfig::custom([&](std::span<const Key> keys, float* values) {
    std::fill_n(values, keys.size() * 4, 1.0F);
    cut.reset();  // as a garbage collector might do it
  });
  Table table(custom);
  cut = table.cut({});
  fill(table, 0, 10);
  EXPECT_FALSE(cut.has_value());
  save(table);
  EXPECT_TRUE(table.is_tracking());
}

// Row numbers are looked at before the tables' locks are taken, and a restore may come in between.
TEST_F(RestoreTest, BesideCallsOverManyTablesWhoseRowsAreNoMore) {
  Table small(config());
  fill(small, 0, 10);
  const Bytes file = save(small);
  constexpr std::size_t kKeys = 1000;
  std::vector<RowNumber> rows(kKeys);
  std::vector<Outcome> outcomes(kKeys);
  const std::vector<float> gradients(kKeys * 4, 1.0F);
  std::vector<float> pooled(kKeys * 4);
  for (const bool updates : {true, false}) {
    Table table(config());
    fill(table, -500, kKeys);
    table.map(range(-500, kKeys), rows, outcomes, {.insert = false, .lease = nullptr});
    const Bags bags{rows, outcomes, {}, {}, Pooling::kSum};
    const GradBlock gradient{bags, gradients.data(), 4, nullptr};
    const PoolBlock pool{bags, pooled.data(), 4};
    Restore restore(table);
    add(restore, file);
    internal::FairMutex& rows_mutex = TableAccess::impl(table).rows_mutex;
    std::unique_lock lock(rows_mutex);
    std::thread restoring([&] { restore.commit(0); });
    while (!rows_mutex.is_awaited()) std::this_thread::yield();  // the restore is the first to wait
    std::thread calling([&] {
      if (updates) {
        EXPECT_THROW(update_tables(std::vector<UpdateCall>{{&table, {&gradient, 1}}}),
                     std::invalid_argument);
      } else {
        EXPECT_THROW(pool_tables(std::vector<PoolCall>{{&table, {&pool, 1}}}),
                     std::invalid_argument);
      }
    });
    // So that it mostly has looked at the numbers; later it finds the same.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    lock.unlock();
    restoring.join();
    calling.join();
    EXPECT_EQ(visible_rows(table), visible_rows(small));
  }
}

TEST_F(RestoreTest, BesideCallsWhoseKeysReadSharedRows) {
  TableConfig reading = config();
  reading.default_row = {DefaultKind::kSharedRows, 0.0F, 8};
  Table table(reading);
  const std::vector<RowNumber> rows{7, 0};
  const std::vector<Outcome> outcomes(2, Outcome::kMissing);
  const std::vector<float> gradients(8, 1.0F);
  std::vector<float> pooled(8);
  const Bags bags{rows, outcomes, {}, {}, Pooling::kSum};
  const GradBlock gradient{bags, gradients.data(), 4, nullptr};
  const PoolBlock pool{bags, pooled.data(), 4};
  std::thread restoring([&] {
    for (int i = 0; i < 50; ++i) {
      Restore restore(table);
      restore.commit(0);
    }
  });
  for (int i = 0; i < 500; ++i) {
    table.update({&gradient, 1});
    pool_tables(std::vector<PoolCall>{{&table, {&pool, 1}}});
  }
  restoring.join();
  EXPECT_EQ(table.size(), 0);
}

TEST_F(RestoreTest, SeveralThreadsCommitRestoresOfOneTable) {
  TableConfig admitting = config();
  admitting.admission.emplace();
  admitting.admission->rule = {{.count = 2}};
  admitting.admission->max_records = 100'000;  // groups enough that a copy of them takes a while
  Table table(admitting);
  const auto commit_some = [&](Key first) {
    for (int i = 0; i < 50; ++i) {
      Restore restore(table);
      restore.add_records(std::vector<AdmitRecord>{{first, 1, 0}, {first + 1, 1, 0}});
      restore.commit(0);
      table.check_invariants();
    }
  };
  std::thread other(commit_some, 100);
  commit_some(200);
  other.join();
  EXPECT_EQ(table.stats().admission_records, 2);
}

}  // namespace
}  // namespace recsdk::test::restore_test
