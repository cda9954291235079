// Calls over many tables at once.
#include <algorithm>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <vector>

#include "recsdk/runtime.h"
#include "recsdk/table.h"
#include "table/table_impl.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

// Two calls for one table would wait for each other, or take turns in any order.
template <typename Call>
void check_tables(std::span<const Call> calls) {
  std::vector<const Table*> tables;
  tables.reserve(calls.size());
  for (const Call& call : calls) {
    if (call.table == nullptr)
      throw std::invalid_argument("a call over many tables has no table in one part; set it");
    tables.push_back(call.table);
  }
  std::sort(tables.begin(), tables.end());
  const auto twice = std::adjacent_find(tables.begin(), tables.end());
  if (twice != tables.end()) {
    throw std::invalid_argument(
        "table '" + (*twice)->config().name +
        "' occurs twice in a call over many tables; put its parts together");
  }
}

// Where the rows of each table end: a restore that comes before a call has its lock may leave
// fewer.
template <typename Call>
std::vector<RowNumber> row_ends(std::span<const Call> calls) {
  std::vector<RowNumber> ends;
  ends.reserve(calls.size());
  for (const Call& call : calls) ends.push_back(TableAccess::impl(*call.table).rows.end());
  return ends;
}

template <typename Call, typename Run>
void run_all(std::span<const Call> calls, const Run& run) {
  std::vector<std::exception_ptr> errors(calls.size());
  internal::parallel_for(static_cast<std::int64_t>(calls.size()), 1, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (auto i = static_cast<std::size_t>(begin);
                                i < static_cast<std::size_t>(end); ++i) {
                             try {
                               run(calls[i]);
                             } catch (...) {
                               errors[i] = std::current_exception();
                             }
                           }
                         });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

void map_tables(std::span<const MapCall> calls) {
  check_tables(calls);
  for (const MapCall& call : calls) {
    Table::Impl& table = TableAccess::impl(*call.table);
    table.check_sizes(call.keys.size(), call.outcomes.size());
    table.check_rows(call.keys.size(), call.rows.size());
    table.check_lease(call.options.lease);
  }
  run_all(calls, [](const MapCall& call) {
    call.table->map(call.keys, call.rows, call.outcomes, call.options);
  });
}

void pool_tables(std::span<const PoolCall> calls) {
  check_tables(calls);
  const std::vector<RowNumber> ends = row_ends(calls);
  for (const PoolCall& call : calls) TableAccess::impl(*call.table).check_pool(call.blocks);
  run_all(calls, [&](const PoolCall& call) {
    const Table::Impl& table = TableAccess::impl(*call.table);
    const std::shared_lock lock(table.rows_mutex);
    if (table.rows.end() < ends[static_cast<std::size_t>(&call - calls.data())])
      table.check_pool(call.blocks);
    table.pool(call.blocks);
  });
}

void update_tables(std::span<const UpdateCall> calls) {
  check_tables(calls);
  const std::vector<RowNumber> ends = row_ends(calls);
  for (const UpdateCall& call : calls) TableAccess::impl(*call.table).check_update(call.blocks);
  run_all(calls, [&](const UpdateCall& call) {
    Table::Impl& table = TableAccess::impl(*call.table);
    {
      std::unique_lock lock(table.rows_mutex);
      if (table.rows.end() < ends[static_cast<std::size_t>(&call - calls.data())])
        table.check_update(call.blocks);
      table.update(call.blocks, lock);
    }
    table.cut_memory.ready_some(table.rows.end());
  });
}

}  // namespace recsdk
