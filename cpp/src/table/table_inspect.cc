// What a table tells about itself: size, statistics, export, invariants.
#include <algorithm>
#include <mutex>
#include <string>

#include "recsdk/table.h"
#include "rows/row_values.h"
#include "table/table_impl.h"

namespace recsdk {

using internal::RowState;

std::int64_t Table::size() const { return impl_->keys.size(); }

TableStats Table::stats() const {
  TableStats stats;
  {
    const std::shared_lock rows_lock(impl_->rows_mutex);
    stats.updates = impl_->update_count;
  }
  stats.nonfinite = impl_->num_nonfinite.load();
  const std::shared_lock lock(impl_->index.mutex);
  impl_->index.add_stats(stats);
  stats.row_bytes = std::min(impl_->index.numbers.num_prepared(), impl_->rows.num_records()) *
                    impl_->rows.row_bytes();
  stats.metadata_bytes += impl_->waiting.bytes();
  if (impl_->shared) stats.row_bytes += impl_->shared->num_bytes();
  stats.tracking_bytes += impl_->cut_memory.bytes();
  if (impl_->open_cut != nullptr) {
    stats.tracking_bytes += impl_->open_cut->spare_bytes();
    stats.checkpoint_copied_bytes = impl_->open_cut->copied_bytes();
  }
  stats.checkpoint_waits = impl_->copy_waits.count.load();
  stats.checkpoint_wait_seconds = static_cast<double>(impl_->copy_waits.nanoseconds.load()) * 1e-9;
  return stats;
}

std::int64_t Table::memory_bytes() const {
  const TableStats s = stats();
  return s.index_bytes + s.row_bytes + s.metadata_bytes + s.tracking_bytes +
         s.checkpoint_copied_bytes;
}

std::int64_t Table::export_rows(RowNumber& begin, const ExportBuffer& buffer) const {
  if (begin < 0 || buffer.capacity < 1 || buffer.keys == nullptr) {
    throw std::invalid_argument(
        impl_->title() +
        ": export needs a row number of 0 or more, a capacity of 1 or more and room for keys");
  }
  const Impl& t = *impl_;
  const std::shared_lock lock(t.index.mutex);
  const std::shared_lock rows_lock(t.rows_mutex);
  const std::int64_t state_width = t.layout.state_width();
  const internal::RowAddresses records = t.rows.records();
  std::int64_t n = 0;
  RowNumber row = begin;
  for (; row < t.index.numbers.end() && n < buffer.capacity; ++row) {
    if (t.index.numbers.state(row) != RowState::kVisible) continue;
    buffer.keys[n] = t.index.numbers.key(row);
    if (buffer.weights != nullptr)
      internal::read_weights(t.layout, records, row, buffer.weights + n * t.config.dim);
    if (buffer.state != nullptr)
      internal::read_state(t.layout, records, row, buffer.state + n * state_width);
    ++n;
  }
  begin = row;
  return n;
}

void Table::reserve(std::int64_t num_rows) {
  Impl& t = *impl_;
  const std::unique_lock lock(t.index.mutex);
  const RowNumber old_end = t.index.numbers.end();
  t.index.reserve(num_rows, t.layout.row_bytes());
  t.rows.grow(t.index.numbers.num_prepared());
  t.rows.populate(old_end, t.index.numbers.num_prepared());
}

void Table::check_invariants() const {
  impl_->keys.check_invariants();
  const std::shared_lock lock(impl_->index.mutex);
  if (impl_->begins_with_shared() && impl_->waiting.end() < impl_->index.numbers.end()) {
    throw Error(ErrorCode::kInternal,
                impl_->title() + ": invariant broken: rows in use cannot wait to begin");
  }
}

}  // namespace recsdk
