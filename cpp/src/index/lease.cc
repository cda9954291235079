// Batches in flight: what they hide from readers, and which freed rows they hold back.
#include <mutex>
#include <stdexcept>
#include <string>

#include "index/index_impl.h"
#include "recsdk/index.h"

namespace recsdk {

using internal::LeaseRecord;
using internal::RowState;

namespace {

[[noreturn, gnu::cold]] void throw_released(const std::string& title) {
  throw std::invalid_argument(title + ": the lease is released; take a new one with lease()");
}

}  // namespace

Lease Index::Impl::take_lease(const std::shared_ptr<Impl>& index,
                              std::optional<std::int64_t> step) {
  auto record = std::make_shared<LeaseRecord>(*index);
  auto handle = std::make_shared<Lease::Impl>(Lease::Impl{index, record});
  const std::unique_lock lock(index->mutex);
  if (step && index->last_step && *step < *index->last_step) {
    throw std::invalid_argument(index->title + ": a lease for step " + std::to_string(*step) +
                                " comes after one for step " + std::to_string(*index->last_step) +
                                "; take leases in ascending order of steps");
  }
  record->step = step;
  record->epoch = index->next_epoch;
  record->shares_step = step && index->last_step == step;
  index->open_leases.emplace(record->epoch, record);
  if (step) {
    try {
      index->open_steps.push_back(record);
    } catch (...) {
      index->open_leases.erase(record->epoch);
      throw;
    }
    index->last_step = step;
  }
  ++index->next_epoch;
  Lease lease;
  lease.impl_ = std::move(handle);
  return lease;
}

Lease::Lease(Lease&& other) noexcept = default;

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

Lease::~Lease() { release(); }

// The handle stays: another thread may be about to use it.
void Lease::release() noexcept {
  if (!is_released()) impl_->index->release(*impl_->record);
}

bool Lease::is_released() const noexcept {
  return impl_ == nullptr || impl_->record->is_released.load();
}

std::optional<std::int64_t> Lease::step() const noexcept {
  return is_released() ? std::nullopt : impl_->record->step;
}

// It does not wait for the lock unless it must: the batch after may be on the way to its rows for
// long, and the thread that trains has better to do.
void Index::Impl::release(LeaseRecord& record) noexcept {
  if (record.is_ending.exchange(true)) return record.is_released.wait(false);
  mutex.defer(record);
  record.is_released = true;
  record.is_released.notify_all();
  // A garbage collector may drop a lease while a callback runs under the lock, which is shared then
  // if the callback reads.
  if (mutex.is_in_callback()) return;
  if (const std::unique_lock lock(mutex, std::try_to_lock); lock || !ends_at_once) return;
  const std::unique_lock lock(mutex);
}

void LeaseRecord::run() noexcept { index->end(*this); }

void Index::Impl::end(LeaseRecord& record) noexcept {
  record.has_ended = true;
  open_leases.erase(record.epoch);
  publish_released();
  release_kept_rows();
}

// Makes the oldest batches visible, up to the first that is still in flight.
void Index::Impl::publish_released() noexcept {
  while (!open_steps.empty() && open_steps.front()->has_ended) {
    const LeaseRecord& record = *open_steps.front();
    if (maker != nullptr && !record.new_rows.empty()) maker->show(record.new_rows);
    if (evictor) publish_evicted(record);
    for (const std::uint32_t row : record.new_rows) numbers.set_state(row, RowState::kVisible);
    note_visible(record.new_rows);
    num_returned += record.num_returned;
    num_in_flight -= static_cast<std::int64_t>(record.new_rows.size());
    for (std::size_t o = 0; o < outcome_counts.size(); ++o) outcome_counts[o] += record.outcomes[o];
    open_steps.pop_front();
  }
}

// Batches in flight may outlive it, and end on other threads.
void Index::Impl::drop_maker() noexcept {
  std::shared_ptr<RowMaker> dropped;  // which ends without the lock
  if (mutex.is_in_callback()) {
    dropped = std::move(maker);
    return;
  }
  const std::unique_lock lock(mutex);
  dropped = std::move(maker);
}

// A row freed at epoch e may be in use by leases whose epoch is below e.
void Index::Impl::release_kept_rows() noexcept {
  const std::uint64_t epoch = open_leases.empty() ? next_epoch + 1 : open_leases.begin()->first + 1;
  if (leavers != nullptr && leavers->has_waiting(epoch)) copy_left(*leavers, epoch);
  numbers.release_before(epoch);
}

std::shared_ptr<LeaseRecord> Index::Impl::check_lease(const Lease* lease) const {
  if (lease == nullptr) return nullptr;
  if (lease->impl_ != nullptr && lease->impl_->index.get() != this) {
    throw std::invalid_argument(title + ": the lease belongs to " + lease->impl_->index->title +
                                "; take one from the one that is called");
  }
  std::shared_ptr<LeaseRecord> record = lease->impl_ == nullptr ? nullptr : lease->impl_->record;
  if (record == nullptr || record->is_released.load()) throw_released(title);
  return record;
}

void Index::Impl::require_open(const LeaseRecord* record) const {
  if (record != nullptr && record->is_released.load()) throw_released(title);
}

}  // namespace recsdk
