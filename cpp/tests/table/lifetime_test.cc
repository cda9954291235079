// What is taken of a table stays usable without it, and what was moved from may be used again.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "recsdk/checkpoint.h"
#include "recsdk/leavers.h"
#include "recsdk/table.h"
#include "saving_tables.h"

namespace recsdk::test::lifetime {

Table table_of(std::span<const Key> keys) {
  TableConfig config;
  config.dim = 3;
  config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
  Table table(config);
  std::vector<float> values(keys.size() * 3);
  table.find_or_insert(keys, values.data());
  return table;
}

constexpr std::array<Key, 3> kKeys = {-1, 0, 7};

TEST(Lifetime, ACutIsWrittenWithoutItsTable) {
  std::optional<Table> table(table_of(kKeys));
  const std::vector<FileRow> rows = visible_rows(*table);
  Cut cut = table->cut({});
  table.reset();
  MemorySink sink;
  write_rows(cut, sink);
  cut.finish(true);
  Table other = table_of({});
  restore_into(other, {sink.content});
  EXPECT_EQ(visible_rows(other), rows);
}

TEST(Lifetime, LeasesLeaversAndRestoresEndWithoutTheirTable) {
  std::optional<Table> table(table_of(kKeys));
  const Bytes file = save(*table);
  Restore restore(*table);
  add(restore, file);
  Leavers leavers = table->leavers({});
  table->erase(std::span(kKeys).first(1));
  Lease lease = table->lease(1);
  table.reset();
  std::array<Key, 3> keys = {};
  EXPECT_EQ(leavers.read({.capacity = 3, .keys = keys.data()}), 1);
  EXPECT_EQ(keys[0], kKeys[0]);
  lease.release();
  EXPECT_EQ(restore.num_rows(), 3);
}

TEST(Lifetime, ATableThatWasMovedFromTakesAnother) {
  Table table = table_of(kKeys);
  const Table moved = std::move(table);
  EXPECT_EQ(moved.size(), 3);
  table = table_of(std::span(kKeys).first(2));
  EXPECT_EQ(table.size(), 2);
}

}  // namespace recsdk::test::lifetime
