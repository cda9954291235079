// New rows that begin with the shared row which their keys read.
//
// A pipeline maps batches ahead, when the shared rows are not what they will be once a batch is
// trained. So rows of batches in flight wait, and begin when a call reads or trains them by number,
// at the latest when readers see them: what they begin with does not depend on how far ahead a
// batch is mapped.
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <span>

#include "rows/row_values.h"
#include "table/table_impl.h"

namespace recsdk {

void Table::Impl::let_wait(RowNumber end) {
  if (begins_with_shared()) waiting.grow(end);
}

void Table::Impl::make_from_shared(const NewRows& added) {
  if (added.are_in_flight()) {
    for (const std::uint32_t row : added.rows()) waiting.add(row);
    return;
  }
  const std::shared_lock lock(rows_mutex);
  for (const std::uint32_t row : added.rows()) {
    waiting.take(row);  // of a call that was taken back
    begin_row(row);
  }
}

void Table::Impl::begin_row(RowNumber row) noexcept {
  const RowField& field = layout.fields[0];
  const std::int64_t from = shared_row(index.numbers.key(row), shared->size());
  std::copy_n(internal::field_address(shared->records(), field, from),
              config.dim * bytes_of(config.weight_dtype),
              internal::field_address(rows.records(), field, row));
  internal::reset_state(layout, rows.records(), row);
  if (index.follows_weights()) index.unmeasured->note(row);
}

void Table::Impl::begin_rows(const Bags& mapped) {
  if (waiting.is_empty()) return;
  std::size_t i = 0;
  while (i < mapped.rows.size() && !(has_row(mapped.outcomes[i]) && waiting.test(mapped.rows[i])))
    ++i;
  if (i == mapped.rows.size()) return;
  const std::unique_lock lock(rows_mutex);
  begin_waiting(mapped);
}

void Table::Impl::begin_rows(std::span<const PoolBlock> blocks) {
  for (const PoolBlock& block : blocks) begin_rows(block.bags);
}

void Table::Impl::begin_waiting(const Bags& mapped) noexcept {
  if (waiting.is_empty()) return;
  for (std::size_t i = 0; i < mapped.rows.size(); ++i) {
    const RowNumber row = mapped.rows[i];
    if (has_row(mapped.outcomes[i]) && waiting.take(row)) begin_row(row);
  }
}

void Table::Impl::show(std::span<const std::uint32_t> row_numbers) noexcept {
  if (waiting.is_empty()) return;
  const std::unique_lock lock(rows_mutex);
  for (const std::uint32_t row : row_numbers) {
    if (waiting.take(row)) begin_row(row);
  }
}

}  // namespace recsdk
