// Every allocation of Table::prepare_cuts fails once: the table is as it was, and can be saved.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "allocation_failure_helpers.h"
#include "allocation_failure_operators.h"
#include "cut_helpers.h"
#include "recsdk/recsdk.h"
#include "util/memory.h"

namespace recsdk::test {
namespace {

constexpr std::int64_t kDim = 60;
constexpr std::int64_t kRowsPerUpdate = 2000;

std::vector<Key> range(Key first, std::size_t n) {
  std::vector<Key> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config() {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = OptimizerConfig::adagrad(0.1F);
  config.hash_seed = 3;
  return config;
}

/// A table with rows, free rows and, if it was saved, changes since then.
struct Subject {
  explicit Subject(bool was_saved = true) : table(config()) {
    const std::vector<float> values(2500 * kDim, 1.0F);
    table.upsert(range(0, 2500), values.data());
    if (was_saved) save(table);
    table.erase(range(10, 300));
    table.apply_gradients(range(0, 500), values.data());
  }

  void update() {
    const std::vector<float> gradients(1000 * kDim, 0.5F);
    table.apply_gradients(range(1000, 1000), gradients.data());
  }

  /// Saves what has changed, or all if nothing was saved before.
  FileContent saved() { return read_all(open(save(table, table.is_tracking()))); }

  Table table;
};

using Act = std::function<void(Subject&)>;

class PrepareCutsAllocationTest : public testing::Test {
 protected:
  PrepareCutsAllocationTest() { internal::set_page_allocation_hook(fail_pages); }
  ~PrepareCutsAllocationTest() override { internal::set_page_allocation_hook(nullptr); }

  static FileContent written(Cut& cut) {
    MemorySink sink;
    WriteOptions options;
    options.file = tiny_blocks();
    write_rows(cut, sink, options);
    return read_all(open(sink.content));
  }

  /// What is to be saved is saved beside an update, and then all rows.
  static void expect_usable(Subject& subject, const FileContent& expected) {
    {
      Cut cut =
          subject.table.cut({.changes_only = subject.table.is_tracking(), .max_copy_bytes = {}});
      subject.update();
      const FileContent found = written(cut);
      ASSERT_EQ(found.rows, expected.rows);
      ASSERT_EQ(found.erased, expected.erased);
    }
    ASSERT_EQ(read_all(open(save(subject.table))).rows, visible_rows(subject.table));
    ASSERT_NO_THROW(subject.table.check_invariants());
  }

  /// prepare_cuts with each allocation failing once, on a table that `before` was done to.
  static void fail_each(bool was_saved, const Act& before) {
    Subject undisturbed(was_saved);
    before(undisturbed);
    undisturbed.table.prepare_cuts(kRowsPerUpdate);
    const std::int64_t bytes = undisturbed.table.stats().tracking_bytes;
    const FileContent expected = undisturbed.saved();
    bool was_met = false;
    for (std::int64_t n = 0;; ++n) {
      SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
      Subject subject(was_saved);
      before(subject);
      const Snapshot held(subject.table);
      const Ending ending = run_failing(n, [&] { subject.table.prepare_cuts(kRowsPerUpdate); });
      was_met = was_met || ending != Ending::kUndisturbed;
      ASSERT_TRUE(Snapshot(subject.table) == held);
      ASSERT_NO_THROW(subject.table.check_invariants());
      ASSERT_EQ(subject.table.is_tracking(), was_saved);
      if (n % 2 == 0) {  // as well after another try as without
        ASSERT_NO_THROW(subject.table.prepare_cuts(kRowsPerUpdate));
        ASSERT_EQ(subject.table.stats().tracking_bytes, bytes);
      }
      expect_usable(subject, expected);
      if (HasFatalFailure() || ending == Ending::kUndisturbed) break;
    }
    EXPECT_TRUE(was_met);
  }
};

TEST_F(PrepareCutsAllocationTest, TheFirstTime) {
  fail_each(false, [](Subject&) {});
}

TEST_F(PrepareCutsAllocationTest, OfATableThatHasGrown) {
  fail_each(true, [](Subject& subject) {
    subject.table.prepare_cuts(kRowsPerUpdate);
    std::vector<float> values(std::size_t{9000} * kDim);
    subject.table.find_or_insert(range(5000, 9000), values.data());
    subject.table.erase(range(5000, 9000));
  });
}

// The cut that is open has parts of its own, which nothing here may touch.
TEST_F(PrepareCutsAllocationTest, BesideAnOpenCut) {
  for (std::int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    Subject subject;
    const std::vector<FileRow> rows = visible_rows(subject.table);
    std::optional<Cut> cut(subject.table.cut({}));
    subject.update();
    const Ending ending = run_failing(n, [&] { subject.table.prepare_cuts(kRowsPerUpdate); });
    subject.update();
    ASSERT_EQ(written(*cut).rows, rows);
    cut->finish(true);
    subject.update();
    ASSERT_EQ(read_all(open(save(subject.table, true))).rows.size(), 1000U);
    ASSERT_NO_THROW(subject.table.check_invariants());
    if (ending == Ending::kUndisturbed) break;
  }
}

}  // namespace
}  // namespace recsdk::test
