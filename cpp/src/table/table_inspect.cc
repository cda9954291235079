// What a table tells about itself: size, statistics, export, invariants.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "recsdk/table.h"
#include "rows/row_values.h"
#include "table/table_impl.h"

namespace recsdk {

using internal::RowState;

namespace {

[[noreturn, gnu::cold]] void broken(const std::string& title, const std::string& what) {
  throw Error(ErrorCode::kInternal, title + ": invariant broken: " + what);
}

// Memory that is backed ahead and is not there would end the process rather than throw.
void require_memory(const Table::Impl& table, std::int64_t num_rows) {
  if (num_rows > std::int64_t{1} << 32) return;  // the row store refuses that
  const std::int64_t more = std::max<std::int64_t>(num_rows - table.rows.end(), 0);
  constexpr double kBesideRecord = 30.0;  // bytes a row of index and metadata
  const double needed =
      static_cast<double>(more) * (static_cast<double>(table.layout.row_bytes()) + kBesideRecord);
  const std::optional<std::uint64_t> available = internal::available_memory();
  if (!available || needed <= static_cast<double>(*available)) return;
  throw Error(ErrorCode::kOutOfMemory,
              table.title() + ": reserving " + std::to_string(num_rows) + " rows needs about " +
                  std::to_string(static_cast<std::uint64_t>(needed / 1048576.0)) +
                  " MiB more, and " + std::to_string(*available / 1048576) +
                  " MiB are available; reserve fewer rows");
}

}  // namespace

std::int64_t Table::size() const {
  const std::shared_lock lock(impl_->index_mutex);
  return impl_->index.size() - impl_->num_in_flight;
}

TableStats Table::stats() const {
  TableStats stats;
  {
    const std::shared_lock rows_lock(impl_->rows_mutex);
    stats.updates = impl_->update_count;
  }
  stats.nonfinite = impl_->num_nonfinite.load();
  const std::shared_lock lock(impl_->index_mutex);
  stats.num_rows = impl_->index.size() - impl_->num_in_flight;
  stats.num_rows_in_flight = impl_->num_in_flight;
  for (int o = 0; o < kNumOutcomes; ++o)
    stats.outcomes[o] = impl_->outcome_counts[static_cast<std::size_t>(o)].load();
  stats.erased = impl_->num_erased;
  const internal::IndexStats index = impl_->index.stats();
  stats.index_bytes = index.bytes;
  stats.index_slots = index.hashed.slots;
  stats.index_segments = index.hashed.segments;
  stats.index_crowded = index.hashed.crowded;
  stats.index_directory = index.hashed.directory;
  stats.index_splits = index.hashed.splits;
  stats.index_overflowed = index.hashed.overflowed;
  stats.index_probes = index.hashed.probes;
  stats.index_dense_keys = index.dense_keys;
  stats.index_dense_pages = index.dense_pages;
  stats.row_bytes = impl_->rows.record_bytes();
  stats.metadata_bytes = impl_->rows.metadata_bytes();
  stats.tracking_bytes = impl_->cut_memory.bytes();
  if (impl_->tracker != nullptr) stats.tracking_bytes += impl_->tracker->bytes();
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
  const std::shared_lock lock(t.index_mutex);
  const std::shared_lock rows_lock(t.rows_mutex);
  const std::int64_t state_width = t.layout.state_width();
  const internal::RowAddresses records = t.rows.records();
  std::int64_t n = 0;
  RowNumber row = begin;
  for (; row < t.rows.end() && n < buffer.capacity; ++row) {
    if (t.rows.state(row) != RowState::kVisible) continue;
    buffer.keys[n] = t.rows.key(row);
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
  if (num_rows < 0) {
    throw std::invalid_argument(impl_->title() + ": cannot reserve " + std::to_string(num_rows) +
                                " rows; pass 0 or more");
  }
  const std::unique_lock lock(impl_->index_mutex);
  require_memory(*impl_, num_rows);
  impl_->rows.reserve(num_rows);
  impl_->index.reserve(num_rows);
}

void Table::check_invariants() const {
  const Impl& t = *impl_;
  const std::shared_lock lock(t.index_mutex);
  t.index.check_invariants();
  std::int64_t used = 0;
  std::int64_t in_flight = 0;
  for (RowNumber row = 0; row < t.rows.end(); ++row) {
    if (t.rows.state(row) == RowState::kFree) continue;
    ++used;
    in_flight += static_cast<std::int64_t>(t.rows.state(row) == RowState::kInFlight);
    const auto found = t.index.find_one(t.rows.key(row));
    if (!found || *found != row) {
      broken(t.title(),
             "row " + std::to_string(row) + " is used by a key that the index does not lead to it");
    }
  }
  if (used != t.index.size()) broken(t.title(), "rows in use and keys differ in number");
  if (in_flight != t.num_in_flight) broken(t.title(), "the count of rows in flight is wrong");
  if (used + t.rows.num_free() != t.rows.end()) broken(t.title(), "a row is neither used nor free");
  std::vector<std::uint32_t> free_rows = t.rows.free_rows();
  std::sort(free_rows.begin(), free_rows.end());
  if (std::adjacent_find(free_rows.begin(), free_rows.end()) != free_rows.end()) {
    broken(t.title(), "a row is free twice");
  }
  if (t.config.max_rows && used > *t.config.max_rows)
    broken(t.title(), "there are more rows than max_rows");
}

}  // namespace recsdk
