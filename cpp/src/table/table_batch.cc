// Calls over many tables at once.
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "index/many.h"
#include "recsdk/table.h"
#include "table/table_impl.h"

namespace recsdk {
namespace {

template <typename Call>
void check_tables(std::span<const Call> calls) {
  internal::check_distinct(
      calls, [](const Call& call) -> const Table* { return call.table; },
      [](const Table& table) { return TableAccess::impl(table).title(); });
}

// Where the rows of each table end: a restore that comes before a call has its lock may leave
// fewer.
template <typename Call>
std::vector<RowNumber> row_ends(std::span<const Call> calls) {
  std::vector<RowNumber> ends;
  ends.reserve(calls.size());
  for (const Call& call : calls) ends.push_back(TableAccess::impl(*call.table).index.numbers.end());
  return ends;
}

}  // namespace

void map_tables(std::span<const MapCall> calls) {
  check_tables(calls);
  std::vector<IndexMapCall> of_indexes;
  of_indexes.reserve(calls.size());
  for (const MapCall& call : calls)
    of_indexes.push_back({&call.table->index(), call.keys, call.rows, call.outcomes, call.options});
  map_indexes(of_indexes);
}

void pool_tables(std::span<const PoolCall> calls) {
  check_tables(calls);
  const std::vector<RowNumber> ends = row_ends(calls);
  for (const PoolCall& call : calls) TableAccess::impl(*call.table).check_pool(call.blocks);
  internal::check_apart(calls);
  internal::run_all(calls, [&](const PoolCall& call) {
    Table::Impl& table = TableAccess::impl(*call.table);
    table.begin_rows(call.blocks);
    const std::shared_lock lock(table.rows_mutex);
    if (table.index.numbers.end() < ends[static_cast<std::size_t>(&call - calls.data())])
      table.check_pool(call.blocks);
    table.pool(call.blocks);
  });
}

void update_tables(std::span<const UpdateCall> calls) {
  check_tables(calls);
  const std::vector<RowNumber> ends = row_ends(calls);
  for (const UpdateCall& call : calls) TableAccess::impl(*call.table).check_update(call.blocks);
  internal::check_apart(calls);
  internal::run_all(calls, [&](const UpdateCall& call) {
    Table::Impl& table = TableAccess::impl(*call.table);
    {
      std::unique_lock lock(table.rows_mutex);
      if (table.index.numbers.end() < ends[static_cast<std::size_t>(&call - calls.data())])
        table.check_update(call.blocks);
      table.update(call.blocks, lock);
    }
    table.cut_memory.ready_some(table.index.numbers.end());
  });
}

}  // namespace recsdk
