// What an index tells about itself: size, statistics, its keys, invariants.
#include <algorithm>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/index_impl.h"
#include "util/memory.h"
#include "util/must.h"

namespace recsdk {

using internal::RowState;

namespace {

[[noreturn, gnu::cold]] void broken(const std::string& title, const std::string& what) {
  throw Error(ErrorCode::kInternal, title + ": invariant broken: " + what);
}

}  // namespace

void Index::Impl::add_stats(IndexStats& stats) const {
  stats.num_rows = num_visible();
  stats.num_rows_in_flight = num_in_flight;
  for (const auto& record : open_steps) {
    if (record->has_ended)
      stats.num_rows_held_back += static_cast<std::int64_t>(record->new_rows.size());
  }
  for (std::size_t o = 0; o < outcome_counts.size(); ++o)
    stats.outcomes[o] = outcome_counts[o].load();
  stats.erased = num_erased;
  stats.evicted = num_evicted;
  stats.expired = num_expired;
  stats.returned = num_returned;
  stats.churn_lost = churn ? churn->num_lost() : 0;
  stats.admission_records = admission ? admission->size() : 0;
  stats.records_lost = admission ? admission->num_lost() : 0;
  const internal::KeyMapStats map = key_map.stats();
  stats.index_bytes = map.bytes;
  stats.index_slots = map.hashed.slots;
  stats.index_segments = map.hashed.segments;
  stats.index_crowded = map.hashed.crowded;
  stats.index_directory = map.hashed.directory;
  stats.index_splits = map.hashed.splits;
  stats.index_overflowed = map.hashed.overflowed;
  stats.index_probes = map.hashed.probes;
  stats.index_dense_keys = map.dense_keys;
  stats.index_dense_pages = map.dense_pages;
  stats.metadata_bytes = numbers.metadata_bytes() + (capacity ? capacity->bytes() : 0) +
                         (evictor ? evictor->bytes() : 0) + (admission ? admission->bytes() : 0) +
                         (churn ? churn->bytes() : 0) + (unmeasured ? unmeasured->bytes() : 0);
  if (tracker != nullptr) stats.tracking_bytes += tracker->bytes();
}

void Index::Impl::check_invariants() const {
  key_map.check_invariants();
  std::int64_t used = 0;
  std::int64_t in_flight = 0;
  std::int64_t leaving = 0;
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) == RowState::kFree) continue;
    ++used;
    in_flight += static_cast<std::int64_t>(numbers.state(row) == RowState::kInFlight);
    const auto found = key_map.find_one(numbers.key(row));
    leaving += static_cast<std::int64_t>(numbers.is_leaving(row));
    if (numbers.is_leaving(row) ? found == row : found != row) {
      broken(title,
             "row " + std::to_string(row) + " is used by a key that the index does not lead to it");
    }
  }
  if (leaving != num_leaving) broken(title, "the count of rows that leave is wrong");
  if (used != key_map.size() + leaving) broken(title, "rows in use and keys differ in number");
  if (in_flight != num_in_flight) broken(title, "the count of rows in flight is wrong");
  if (used + numbers.num_free() != numbers.end()) broken(title, "a row is neither used nor free");
  std::vector<std::uint32_t> free_rows = numbers.free_rows();
  std::sort(free_rows.begin(), free_rows.end());
  if (std::adjacent_find(free_rows.begin(), free_rows.end()) != free_rows.end())
    broken(title, "a row is free twice");
  if (admission) {
    if (const std::string what = admission->find_broken(key_map); !what.empty())
      broken(title, what);
  }
  if (churn) {
    if (const std::string what = churn->find_broken(key_map); !what.empty()) broken(title, what);
  }
  if (config.max_rows && key_map.size() > *config.max_rows)
    broken(title, "there are more rows than max_rows");
  if (!capacity) return;
  if (!capacity->is_right(numbers)) broken(title, "a group's count of keys is wrong");
  if (capacity->find_overfull(numbers)) broken(title, "a group has more rows than its quota");
  if (!evictor) return;
  if (const std::string what = evictor->find_broken(numbers, *capacity); !what.empty())
    broken(title, what);
}

// Memory that is backed ahead and is not there would end the process rather than throw.
void Index::Impl::require_memory(std::int64_t num_rows, std::int64_t record_bytes) const {
  if (num_rows > internal::kMaxRows) return;  // too many row numbers, which says so
  const std::int64_t more = std::max<std::int64_t>(num_rows - numbers.end(), 0);
  constexpr double kBesideRecord = 30.0;  // bytes a row of index and metadata
  const double needed =
      static_cast<double>(more) * (static_cast<double>(record_bytes) + kBesideRecord);
  const std::optional<std::uint64_t> available = internal::available_memory();
  if (!available || needed <= static_cast<double>(*available)) return;
  throw Error(ErrorCode::kOutOfMemory,
              title + ": reserving " + std::to_string(num_rows) + " rows needs about " +
                  std::to_string(static_cast<std::uint64_t>(needed / 1048576.0)) +
                  " MiB more, and " + std::to_string(*available / 1048576) +
                  " MiB are available; reserve fewer rows");
}

void Index::Impl::reserve(std::int64_t num_rows, std::int64_t record_bytes) {
  if (num_rows < 0)
    throw std::invalid_argument(title + ": " +
                                internal::must("num_rows of reserve", "be 0 or more", num_rows));
  require_memory(num_rows, record_bytes);
  numbers.reserve(num_rows);
  key_map.reserve(num_rows);
}

std::int64_t Index::size() const {
  const std::shared_lock lock(impl_->mutex);
  return impl_->num_visible();
}

RowNumber Index::end_row() const noexcept { return impl_->numbers.end(); }

IndexStats Index::stats() const {
  IndexStats stats;
  const std::shared_lock lock(impl_->mutex);
  impl_->add_stats(stats);
  return stats;
}

std::int64_t Index::export_keys(RowNumber& begin, std::span<Key> keys,
                                std::span<RowNumber> rows) const {
  if (begin < 0 || keys.empty() || keys.size() != rows.size()) {
    throw std::invalid_argument(impl_->title +
                                ": export_keys needs a row number of 0 or more, and room for as "
                                "many keys as rows, 1 or more");
  }
  internal::require_apart(internal::CallArray("rows", rows), {{"keys", keys}},
                          [this] { return impl_->title; });
  const std::shared_lock lock(impl_->mutex);
  const internal::RowNumbers& numbers = impl_->numbers;
  std::size_t n = 0;
  RowNumber row = begin;
  for (; row < numbers.end() && n < keys.size(); ++row) {
    if (numbers.state(row) != RowState::kVisible) continue;
    keys[n] = numbers.key(row);
    rows[n] = row;
    ++n;
  }
  begin = row;
  return static_cast<std::int64_t>(n);
}

void Index::reserve(std::int64_t num_rows) {
  const std::unique_lock lock(impl_->mutex);
  impl_->reserve(num_rows, 0);
}

void Index::check_invariants() const {
  const std::shared_lock lock(impl_->mutex);
  impl_->check_invariants();
}

}  // namespace recsdk
