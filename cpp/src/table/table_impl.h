// The state behind a Table: an index, the rows that it keeps for it, and the steps that calls are
// made of.
//
// Locks, taken in this order:
//
// 1. index.mutex guards keys, row numbers, leases and counters of outcomes, see index_impl.h.
// 2. rows_mutex guards the contents of rows that readers can reach. Updates hold it alone. Pooling
//    shares it.
// 3. A cut has a mutex of its own, see cut_state.h.
//
// Taking and finishing a cut, and a restore's commit, hold the first two alone. A thread may thus
// insert the rows of later batches while another pools and updates this batch. New rows are filled
// under index.mutex only: nobody else knows their numbers yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bags/gradients.h"
#include "cut/update_copies.h"
#include "index/index_impl.h"
#include "kernels/kernels.h"
#include "recsdk/row_file.h"
#include "recsdk/table.h"
#include "rows/row_store.h"
#include "table/shared_store.h"
#include "table/waiting_rows.h"
#include "util/fair_mutex.h"

namespace recsdk {

namespace internal {

/// Adds one to a count for as long as it lives.
class CountedIn {
 public:
  explicit CountedIn(std::atomic<int>& count) noexcept : count_(count) { ++count_; }
  CountedIn(const CountedIn&) = delete;
  CountedIn& operator=(const CountedIn&) = delete;
  ~CountedIn() { --count_; }

 private:
  std::atomic<int>& count_;
};

}  // namespace internal

struct Table::Impl final : RowMaker {
  explicit Impl(TableConfig table_config);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() override { index.close_reader(); }

  const TableConfig config;
  const RowLayout layout;
  const std::uint64_t table_hash;
  Index keys;          // whose rows are here
  Index::Impl& index;  // its state
  internal::RowStore rows;
  std::optional<internal::SharedStore> shared;  // if that is what keys without a row read
  internal::WaitingRows waiting;                // that are to begin with one of them

  mutable internal::FairMutex rows_mutex;
  std::uint64_t update_count = 0;
  double log_decay = 0.0;  // sum of log(1 - lr * weight_decay), for catching up
  std::atomic<std::uint64_t> num_nonfinite{0};
  std::atomic<float> learning_rate;

  // Changed under both locks, read under either.
  std::shared_ptr<internal::CutState> open_cut;
  internal::CutMemory cut_memory;
  internal::CopyWaits copy_waits;
  // Updates under way, to which the reader of a cut gives way; those that wait for it do not count.
  std::atomic<int> num_updating{0};

  const std::string& title() const noexcept { return index.title; }

  /// Of a row in files: those of the layout, then what eviction keeps of a key.
  std::vector<FileField> file_fields() const;
  /// Bytes of each of the latter.
  std::vector<std::size_t> meta_bytes() const;

  // What the index asks of its rows' maker; index.mutex is held alone.
  void prepare(RowNumber end, std::span<const std::uint32_t> reused) override;
  void make(const NewRows& added) override;
  bool checks() const override { return config.initializer.kind == InitializerKind::kCustom; }
  void check(std::span<const Key> without_row) override;
  void show(std::span<const std::uint32_t> row_numbers) noexcept override;
  void make_from_shared(const NewRows& added);
  bool has_norms() const override { return true; }
  void norms(std::span<const std::uint32_t> row_numbers, std::span<float> found) const override;
  void initialize(const NewRows& added, std::int64_t begin, std::int64_t end);
  void initialize_custom(const NewRows& added);
  void initialize_state(const NewRows& added, std::int64_t begin, std::int64_t end);
  void populate_ahead(std::int64_t num_new) noexcept;
  /// Shared rows as a new table has them; none if it has no such. May call a custom initializer.
  std::optional<internal::SharedStore> make_shared() const;
  /// Copies rows that have left; index.mutex is held alone.
  void copy_left(internal::LeaverQueue& queue, std::uint64_t epoch) noexcept;
  void preserve_found(const internal::Found& found);

  bool begins_with_shared() const noexcept {
    return config.default_row.begin_with == BeginWith::kSharedRow;
  }
  /// Lets rows [0, end) wait, if new rows are to begin with shared ones. Before keys get them.
  void let_wait(RowNumber end);
  /// Begins those of these keys' rows that wait, see begin_rows.cc. The bags have been checked, and
  /// no lock is held; a restore may come in between, after which nothing waits.
  void begin_rows(const Bags& mapped);
  void begin_rows(std::span<const PoolBlock> blocks);
  /// The same where rows_mutex is held alone.
  void begin_waiting(const Bags& mapped) noexcept;
  void begin_row(RowNumber row) noexcept;

  // By row number; rows_mutex is held (alone where not const).
  void gather(const internal::Found& found, float* values) const;
  void write(const internal::Found& found, const float* values, const float* state);
  // Of the shared rows, or of keys' own.
  std::vector<std::uint32_t> rows_beyond(const Bags& mapped, const NormLimit& limit,
                                         bool are_shared) const;
  void pool(std::span<const PoolBlock> blocks) const;
  // index.mutex is held too. `outcomes` (N,) or null.
  void pool_keys(const KeyBags& bags, float* out, std::int64_t stride, Outcome* outcomes) const;
  // May let go of the lock for a while, until a cut has been read further.
  void update(std::span<const GradBlock> blocks, std::unique_lock<internal::FairMutex>& lock);
  internal::CutState::UpdateCopies plan_copies(std::span<const GradBlock> blocks,
                                               const internal::SortedGradients& gradients,
                                               std::unique_lock<internal::FairMutex>& lock);
  void write_weights_grad(const GradBlock& block) const;

  // Checks of arguments: throw std::invalid_argument, hold no lock.
  void check_log_decay(double value) const;
  void check_bags(const Bags& bags) const;
  void check_output(std::int64_t num_bags, const float* out, std::int64_t stride) const;
  void check_pool(std::span<const PoolBlock> blocks) const;
  void check_update(std::span<const GradBlock> blocks) const;
};

namespace internal {

/// Throw std::invalid_argument if what calls write lies over anything of theirs. Blocks have been
/// checked, and tables are there.
void check_apart(std::span<const PoolCall> calls);
void check_apart(std::span<const UpdateCall> calls);

}  // namespace internal

/// Lets calls over many tables, and restores, reach what a Table hides.
struct TableAccess {
  static Table::Impl& impl(const Table& table) { return *table.impl_; }
  static std::shared_ptr<Table::Impl> share(const Table& table) { return table.impl_; }
};

}  // namespace recsdk
