// Every allocation of what has to do with cuts and restores fails once: nothing is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "failing_allocations.h"
#include "failing_operator_new.h"
#include "profile.h"
#include "recsdk/recsdk.h"
#include "saving_tables.h"
#include "temporary_file.h"
#include "util/memory.h"

namespace recsdk::test::cut_allocation_test {
namespace {

constexpr std::int64_t kDim = 60;  // copies lie in several regions

std::vector<Key> range(Key first, std::size_t n) {
  std::vector<Key> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config() {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = OptimizerConfig::adagrad(0.1F);
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  config.hash_seed = 3;
  config.num_threads = 2;
  return config;
}

/// A table with rows, free rows and tracked changes, and maybe an open cut.
struct Subject {
  Subject() : table(config()) {
    std::vector<float> values(2500 * kDim);
    table.find_or_insert(range(0, 2500), values.data());
    save(table);
    table.erase(range(10, 300));
    table.apply_gradients(range(0, 500), values.data());
  }

  /// What the open cut writes.
  FileContent written() {
    MemorySink sink;
    WriteOptions options;
    options.file = tiny_blocks();
    write_rows(*cut, sink, options);
    return read_all(open(sink.content));
  }

  Table table;
  std::optional<Cut> cut;
};

using Act = std::function<void(Subject&)>;

class CutAllocationTest : public testing::Test {
 protected:
  CutAllocationTest() { internal::set_page_allocation_hook(fail_pages); }
  ~CutAllocationTest() override { internal::set_page_allocation_hook(nullptr); }

  /// call(subject) while a cut is open, with each allocation failing once: the table is as it was,
  /// and the cut too.
  static void fail_each_beside_a_cut(const Act& call) {
    bool was_met = false;
    for (std::int64_t n = 0;; ++n) {
      SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
      Subject subject;
      subject.cut = subject.table.cut({});
      const std::vector<FileRow> rows = visible_rows(subject.table);
      const Snapshot before(subject.table);
      const Ending ending = run_failing(n, [&] { call(subject); });
      ASSERT_NO_THROW(subject.table.check_invariants());
      if (ending == Ending::kOutOfMemory) {
        was_met = true;
        ASSERT_TRUE(Snapshot(subject.table) == before);
        ASSERT_NO_THROW(call(subject));
      }
      ASSERT_EQ(subject.written().rows, rows);
      subject.cut->finish(true);
      if (ending == Ending::kUndisturbed) break;
    }
    EXPECT_TRUE(was_met);
  }
};

TEST_F(CutAllocationTest, TakingACut) {
  for (const bool changes_only : {false, true}) {
    for (std::int64_t n = 0;; ++n) {
      Subject subject;
      const Snapshot before(subject.table);
      const Ending ending =
          run_failing(n, [&] { subject.cut = subject.table.cut({changes_only, {}}); });
      ASSERT_TRUE(Snapshot(subject.table) == before);
      ASSERT_TRUE(subject.table.is_tracking());
      if (ending == Ending::kUndisturbed) break;
      if (!subject.cut) subject.cut = subject.table.cut({changes_only, {}});
      const FileContent content = subject.written();
      ASSERT_EQ(content.rows.size(), changes_only ? 200U : 2200U);
      ASSERT_EQ(content.erased.size(), changes_only ? 300U : 0U);
    }
  }
}

TEST_F(CutAllocationTest, Updating) {
  const std::vector<float> gradients(2500 * kDim, 0.5F);
  fail_each_beside_a_cut(
      [&](Subject& s) { s.table.apply_gradients(range(400, 2500), gradients.data()); });
}

// An update readies memory for cuts when it is done: that may fail, and nobody needs to know.
TEST_F(CutAllocationTest, ReadyingMemoryWhileATableIsTrained) {
  constexpr std::size_t kMany = 9000;
  const std::vector<float> gradients(kMany * kDim, 0.5F);
  const auto train = [&](Table& table) {
    table.apply_gradients(range(0, kMany), gradients.data());
  };
  const auto made = [&] {
    Table table(config());
    table.upsert(range(0, kMany), gradients.data());
    return table;
  };
  Table undisturbed = made();
  train(undisturbed);
  const std::int64_t bytes = undisturbed.stats().tracking_bytes;
  const std::vector<FileRow> rows = visible_rows(undisturbed);
  EXPECT_GT(bytes, 0);
  bool has_survived = false;
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    Table table = made();
    const Snapshot before(table);
    const Ending ending = run_failing(n, [&] { train(table); });
    has_survived = has_survived || ending == Ending::kSurvived;
    if (ending == Ending::kOutOfMemory) {
      ASSERT_TRUE(Snapshot(table) == before);
      train(table);
    }
    ASSERT_EQ(visible_rows(table), rows);
    Cut cut = table.cut({});
    train(table);
    MemorySink sink;
    write_rows(cut, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
    ASSERT_EQ(read_all(open(sink.content)).rows, rows);
    cut.finish(true);
    train(table);
    ASSERT_GE(table.stats().tracking_bytes, bytes);
    if (ending == Ending::kUndisturbed) break;
  }
  EXPECT_TRUE(has_survived);
}

// A cut that there was no memory for does not end it.
TEST_F(CutAllocationTest, ReadyingMemoryAfterACutThatFailed) {
  constexpr std::size_t kMany = 9000;
  const std::vector<float> gradients(kMany * kDim, 0.5F);
  Table table(config());
  table.upsert(range(0, kMany), gradients.data());
  const auto train = [&] {
    for (int i = 0; i < 20; ++i) table.apply_gradients(range(0, kMany), gradients.data());
    return table.stats().tracking_bytes;
  };
  const std::int64_t bytes = train();
  EXPECT_GT(bytes, 500'000);
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    std::optional<Cut> cut;
    const Ending ending = run_failing(n, [&] { cut = table.cut({}); });
    cut.reset();
    ASSERT_GE(train(), bytes);
    if (ending == Ending::kUndisturbed) break;
  }
}

TEST_F(CutAllocationTest, InsertingIntoRowsUsedBefore) {
  std::vector<float> values(600 * kDim);
  fail_each_beside_a_cut(
      [&](Subject& s) { s.table.find_or_insert(range(-600, 600), values.data()); });
}

TEST_F(CutAllocationTest, Upserting) {
  const std::vector<float> values(600 * kDim, 2.0F);
  fail_each_beside_a_cut([&](Subject& s) { s.table.upsert(range(-300, 600), values.data()); });
}

TEST_F(CutAllocationTest, ErasingAndClearing) {
  fail_each_beside_a_cut([](Subject& s) { s.table.erase(range(1500, 900)); });
  fail_each_beside_a_cut([](Subject& s) { s.table.clear(); });
}

TEST_F(CutAllocationTest, Writing) {
  const std::vector<Codec> usable = codecs();
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    Subject subject;
    subject.cut = subject.table.cut({true, {}});
    MemorySink sink;
    sink.content.reserve(1'000'000);
    WriteOptions options;
    options.file = tiny_blocks(usable[static_cast<std::size_t>(n) % usable.size()]);
    options.file.in_background = n % 3 == 0;
    const Ending ending = run_failing(n, [&] { write_rows(*subject.cut, sink, options); });
    ASSERT_EQ(subject.cut->is_finished(), ending == Ending::kOutOfMemory);
    subject.cut.reset();
    // The changes are there still.
    const FileContent content = read_all(open(save(subject.table, true)));
    ASSERT_EQ(content.rows.size(), 200U);
    ASSERT_EQ(content.erased.size(), 300U);
    if (ending == Ending::kUndisturbed) break;
  }
}

TEST_F(CutAllocationTest, GivingChangesBack) {
  bool was_met = false;
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    Subject subject;
    subject.cut = subject.table.cut({true, {}});
    const Ending ending = run_failing(n, [&] { subject.cut->finish(false); });
    ASSERT_NO_THROW(subject.table.check_invariants());
    if (!subject.table.is_tracking()) {
      was_met = true;
      EXPECT_THROW((void)subject.table.cut({true, {}}), std::invalid_argument);
      EXPECT_EQ(read_all(open(save(subject.table))).rows.size(), 2200U);
    }
    if (ending == Ending::kUndisturbed) break;
    const FileContent content = read_all(open(save(subject.table, subject.table.is_tracking())));
    ASSERT_TRUE(content.erased.empty() || content.erased.size() == 300U);
  }
  EXPECT_TRUE(was_met);
}

TEST_F(CutAllocationTest, Restoring) {
  Subject source;
  const Bytes full = save(source.table, false, 2);
  source.table.erase(range(2000, 100));
  const Bytes delta = save(source.table, true, 3);
  for (std::int64_t n = 0;; n += is_full_profile() ? 1 : 3) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    Table table(config());
    std::vector<float> values(100 * kDim);
    table.find_or_insert(range(-50, 100), values.data());
    const Snapshot before(table);
    const Ending ending = run_failing(n, [&] { restore_into(table, {full, delta}); });
    ASSERT_NO_THROW(table.check_invariants());
    if (ending == Ending::kOutOfMemory) {
      ASSERT_TRUE(Snapshot(table) == before);
      ASSERT_FALSE(table.is_tracking());
      continue;
    }
    ASSERT_EQ(by_key(visible_rows(table)), by_key(visible_rows(source.table)));
    if (ending == Ending::kUndisturbed) break;
  }
}

std::size_t num_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

TEST_F(CutAllocationTest, ReadingAFilePastThePageCache) {
  const TemporaryFile file;
  Bytes bytes(9U << 20);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i >> 8);
  file.put(bytes);
  Bytes piece(100);
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    file.forget();
    const std::size_t num_open = num_open_files();
    auto source = std::make_unique<FileSource>(file.descriptor, "file");
    std::shared_ptr<const std::byte[]> taken;
    const Ending ending = run_failing(n, [&] {
      ASSERT_EQ(source->read(0, piece), piece.size());
      taken = source->take(100, 1U << 20);
    });
    ASSERT_NE(ending, Ending::kOutOfMemory);  // the page cache does it then
    EXPECT_TRUE(std::equal(piece.begin(), piece.end(), bytes.begin()));
    if (taken != nullptr) {
      EXPECT_TRUE(std::equal(taken.get(), taken.get() + (1U << 20), bytes.data() + 100));
    }
    ASSERT_EQ(source->read(200, piece), piece.size());
    EXPECT_TRUE(std::equal(piece.begin(), piece.end(), bytes.begin() + 200));
    source.reset();
    EXPECT_EQ(num_open_files(), num_open);
    if (ending == Ending::kUndisturbed) break;
  }
}

TEST_F(CutAllocationTest, WritingAFilePastThePageCache) {
  const Bytes bytes(10U << 20, std::byte{7});
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    const TemporaryFile file;
    FileSink sink(file.descriptor, "file");
    const Ending ending = run_failing(n, [&] {
      sink.write(bytes);
      sink.finish();
    });
    ASSERT_NE(ending, Ending::kOutOfMemory);
    EXPECT_FALSE(file.is_direct());
    EXPECT_TRUE(file.content() == bytes);
    if (ending == Ending::kUndisturbed) break;
  }
}

}  // namespace
}  // namespace recsdk::test::cut_allocation_test
