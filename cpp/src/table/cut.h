// What is behind a Cut, for those that write it out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cut/cut_state.h"
#include "index/change_tracker.h"
#include "recsdk/checkpoint.h"
#include "table/table_impl.h"

namespace recsdk {

struct Cut::Impl {
  std::shared_ptr<Table::Impl> table;
  std::shared_ptr<internal::CutState> state;
  mutable std::mutex before_mutex;                  // taken before the table's locks
  std::unique_ptr<internal::ChangeTracker> before;  // changes from the parent to the cut, or null
  std::uint64_t memory_ticket = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_erased = 0;
  bool changes_only = false;
  std::uint64_t update_count = 0;
  float learning_rate = 0.0F;
  double log_decay = 0.0;
  std::optional<EvictionState> eviction;
  std::optional<std::vector<AdmitRecord>> admission;
  std::optional<SharedRows> shared;
  std::atomic<bool> is_finished{false};
  std::atomic<bool> is_begun{false};  // somebody reads it

  /// Readies memory for copies, as long as there is need; beside updates, gives way in between.
  void stock(bool is_beside_updates) noexcept;
  /// The next rows, at most `arrays.capacity`; 0 at the end. Throws Error(kBusy) once finished.
  std::int64_t read(const internal::RowArrays& arrays);
  /// The thread that reads beside training calls it now and then. While updates run it waits, up to
  /// four times as long as it has worked since it last waited, and the first time up to 100 ms. On
  /// few cores an update and a thread that writes would else take turns, and both take longer.
  void give_way() noexcept;
  /// Keys that left, by cause and key. Throws Error(kBusy) once finished.
  std::vector<internal::LeftKey> left_keys() const;
  void finish(bool durable) noexcept;

 private:
  // Processor time of the thread that reads, when it gave way last.
  std::optional<std::chrono::nanoseconds> worked_;
};

struct CutAccess {
  static Cut::Impl& impl(Cut& cut) { return *cut.impl_; }
};

}  // namespace recsdk
