// The state behind a Table, its locks, and the steps that its calls are made of.
//
// Locks, taken in this order:
//
// 1. index_mutex guards the index, row numbers, keys and states of rows, leases, and counters of
//    outcomes. Mapping with insertion, erasing and releasing a lease hold it alone. Reading by key
//    shares it.
// 2. rows_mutex guards the contents of rows that readers can reach. Updates hold it alone. Pooling
//    shares it.
// 3. A cut has a mutex of its own, see cut_state.h.
//
// Taking and finishing a cut, and a restore's commit, hold the first two alone. A thread may thus
// insert the rows of later batches while another pools and updates this batch. New rows are filled
// under index_mutex only: nobody else knows their numbers yet.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bags/gradients.h"
#include "cut/change_tracker.h"
#include "cut/update_copies.h"
#include "index/index.h"
#include "kernels/kernels.h"
#include "recsdk/table.h"
#include "rows/row_store.h"
#include "util/fair_mutex.h"

namespace recsdk {

namespace internal {

using OutcomeCounts = std::array<std::uint64_t, kNumOutcomes>;
using AtomicCounts = std::array<std::atomic<std::uint64_t>, kNumOutcomes>;

/// A batch in flight, as the table sees it.
struct LeaseRecord {
  std::uint64_t epoch = 0;
  std::optional<std::int64_t> step;
  std::atomic<bool> is_released{false};  // changed under index_mutex
  std::vector<std::uint32_t> new_rows;   // that only later batches see
  AtomicCounts outcomes{};               // to be counted when the batch becomes visible
};

/// Counts somebody in for as long as it lives.
class CountedIn {
 public:
  explicit CountedIn(std::atomic<int>& count) noexcept : count_(count) { ++count_; }
  CountedIn(const CountedIn&) = delete;
  CountedIn& operator=(const CountedIn&) = delete;
  ~CountedIn() { --count_; }

 private:
  std::atomic<int>& count_;
};

/// Rows that one call gave to keys, so that it can take them back.
struct Insertion {
  std::vector<std::uint32_t> rows;
  RowNumber old_end = 0;

  /// Makes room for `count` more rows: doubling, as push_back would.
  void make_room(std::size_t count) {
    const std::size_t needed = rows.size() + count;
    if (rows.capacity() < needed) rows.reserve(std::max(needed, 2 * rows.capacity()));
  }
};

}  // namespace internal

struct Lease::Impl {
  std::shared_ptr<Table::Impl> table;
  std::shared_ptr<internal::LeaseRecord> record;
};

struct Table::Impl {
  explicit Impl(TableConfig table_config);

  const TableConfig config;
  const RowLayout layout;
  const std::uint64_t table_hash;
  const std::uint64_t hash_seed;

  mutable internal::FairMutex index_mutex;
  internal::Index index;
  internal::RowStore rows;
  bool is_mostly_new = false;  // half or more of the keys inserted last had no row yet
  std::uint64_t next_epoch = 0;
  std::optional<std::int64_t> last_step;
  std::map<std::uint64_t, std::shared_ptr<internal::LeaseRecord>> open_leases;  // by epoch
  std::deque<std::shared_ptr<internal::LeaseRecord>>
      open_steps;                  // with a step, in order; until visible
  std::int64_t num_in_flight = 0;  // keys that readers do not see yet
  std::uint64_t num_erased = 0;
  mutable internal::AtomicCounts outcome_counts{};

  // Where rows lie elsewhere: makes those of an insertion, in place of initial rows here. May
  // throw.
  std::function<void(std::span<const std::uint32_t> row_numbers)> make_rows;

  mutable internal::FairMutex rows_mutex;
  std::uint64_t update_count = 0;
  double log_decay = 0.0;  // sum of log(1 - lr * weight_decay), for catching up
  std::atomic<std::uint64_t> num_nonfinite{0};
  std::atomic<float> learning_rate;

  // Changed under both locks, read under either.
  std::unique_ptr<internal::ChangeTracker> tracker;  // from the first cut or restore on
  bool has_parent = false;                           // there is a save that changes can build on
  std::shared_ptr<internal::CutState> open_cut;
  internal::CutMemory cut_memory;
  internal::CopyWaits copy_waits;
  // Updates under way, but for those that wait for the reader of a cut: it gives way to them.
  std::atomic<int> num_updating{0};

  /// "table 'user_id'", the start of every message.
  std::string title() const { return "table '" + config.name + "'"; }
  int max_threads() const;

  // By key; index_mutex is held (alone where not const).
  void find(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const;
  void find_visible(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const;
  void find_or_insert(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  bool append_new(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                  internal::RowState state, internal::Insertion& insertion);
  void insert_missing(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  void insert_chunk(const Key* keys, std::span<const std::uint16_t> missing, std::int64_t limit,
                    RowNumber* rows_out, Outcome* outcomes, internal::RowState state,
                    internal::Insertion& insertion);
  void undo(const internal::Insertion& insertion) noexcept;
  void populate_ahead(std::int64_t num_new) noexcept;
  std::vector<float> custom_weights(const internal::Insertion& insertion) const;
  void initialize(const internal::Insertion& insertion);
  void initialize_state(const std::uint32_t* row_numbers, std::int64_t count);
  void map_inserting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                     internal::LeaseRecord* record);
  void require_no_steps(const char* call) const;
  void require_open(const internal::LeaseRecord* record) const;
  void preserve_found(std::span<const RowNumber> row_numbers, const Outcome* outcomes);
  Outcome erase_one(Key key) noexcept;
  void count(const internal::OutcomeCounts& counts) const noexcept;
  void end(internal::LeaseRecord& record) noexcept;
  void publish_released() noexcept;
  void note_visible(const std::vector<std::uint32_t>& row_numbers) noexcept;
  void release_kept_rows() noexcept;

  // By row number; rows_mutex is held (alone where not const).
  void gather(const RowNumber* row_numbers, const Outcome* outcomes, std::int64_t n,
              float* values) const;
  void pool(std::span<const PoolBlock> blocks) const;
  // index_mutex is held too. `outcomes` (N,) or null.
  void pool_keys(const KeyBags& bags, float* out, std::int64_t stride, Outcome* outcomes) const;
  // May let go of the lock for a while, until a cut has been read further.
  void update(std::span<const GradBlock> blocks, std::unique_lock<internal::FairMutex>& lock);
  internal::CutState::UpdateCopies plan_copies(std::span<const GradBlock> blocks,
                                               const internal::SortedGradients& gradients,
                                               std::unique_lock<internal::FairMutex>& lock);

  // Takes index_mutex, unless this thread is in a callback under it.
  void release(internal::LeaseRecord& record) noexcept;

  // Checks of arguments: throw std::invalid_argument, hold no lock.
  std::shared_ptr<internal::LeaseRecord> check_lease(const Lease* lease) const;
  void check_update_count(std::uint64_t count) const;
  void check_log_decay(double value) const;
  void check_sizes(std::size_t num_keys, std::size_t num_outcomes) const;
  void check_rows(std::size_t num_keys, std::size_t num_rows) const;
  void check_bags(const Bags& bags) const;
  void check_output(std::int64_t num_bags, const float* out, std::int64_t stride) const;
  void check_pool(std::span<const PoolBlock> blocks) const;
  void check_update(std::span<const GradBlock> blocks) const;
};

namespace internal {

/// Adds counts to counters.
void add_counts(AtomicCounts& counters, const OutcomeCounts& counts) noexcept;

/// Counts the outcomes of one call.
OutcomeCounts count_outcomes(const Outcome* outcomes, std::int64_t n);

}  // namespace internal

/// Lets calls over many tables, and restores, reach what a Table hides.
struct TableAccess {
  static Table::Impl& impl(const Table& table) { return *table.impl_; }
  static std::shared_ptr<Table::Impl> share(const Table& table) { return table.impl_; }
};

}  // namespace recsdk
