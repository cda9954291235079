// Batches in flight: what they hide from readers, and which freed rows they hold back.
#include <mutex>
#include <stdexcept>
#include <string>

#include "embedding/table_impl.h"
#include "recsdk/table.h"

namespace recsdk {

using internal::LeaseRecord;
using internal::RowState;

Lease Table::lease(std::optional<std::int64_t> step) {
  auto record = std::make_shared<LeaseRecord>();
  auto handle = std::make_shared<Lease::Impl>(Lease::Impl{impl_, record});
  const std::unique_lock lock(impl_->index_mutex);
  if (step && impl_->last_step && *step < *impl_->last_step) {
    throw std::invalid_argument(impl_->title() + ": a lease for step " + std::to_string(*step) +
                                " comes after one for step " + std::to_string(*impl_->last_step) +
                                "; take leases in ascending order of steps");
  }
  record->step = step;
  record->epoch = impl_->next_epoch;
  impl_->open_leases.emplace(record->epoch, record);
  if (step) {
    try {
      impl_->open_steps.push_back(record);
    } catch (...) {
      impl_->open_leases.erase(record->epoch);
      throw;
    }
    impl_->last_step = step;
  }
  ++impl_->next_epoch;
  Lease lease;
  lease.impl_ = std::move(handle);
  return lease;
}

Lease::Lease(Lease&& other) noexcept : impl_(std::move(other.impl_)) { other.impl_ = nullptr; }

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    impl_ = std::move(other.impl_);
    other.impl_ = nullptr;
  }
  return *this;
}

Lease::~Lease() { release(); }

void Lease::release() noexcept {
  if (impl_ == nullptr) return;
  const std::shared_ptr<Impl> ended = std::move(impl_);
  impl_ = nullptr;
  Table::Impl& table = *ended->table;
  const std::unique_lock lock(table.index_mutex);
  ended->record->is_released = true;
  table.open_leases.erase(ended->record->epoch);
  table.publish_released();
  table.release_kept_rows();
}

std::optional<std::int64_t> Lease::step() const noexcept {
  return impl_ == nullptr ? std::nullopt : impl_->record->step;
}

// Makes the oldest batches visible, up to the first that is still in flight.
void Table::Impl::publish_released() noexcept {
  while (!open_steps.empty() && open_steps.front()->is_released) {
    const LeaseRecord& record = *open_steps.front();
    for (const std::uint32_t row : record.new_rows) rows.set_state(row, RowState::kVisible);
    num_in_flight -= static_cast<std::int64_t>(record.new_rows.size());
    count(record.outcomes);
    open_steps.pop_front();
  }
}

// A row freed at epoch e may be in use by leases whose epoch is below e.
void Table::Impl::release_kept_rows() noexcept {
  rows.release_before(open_leases.empty() ? next_epoch + 1 : open_leases.begin()->first + 1);
}

LeaseRecord* Table::Impl::check_lease(const Lease* lease) const {
  if (lease == nullptr) return nullptr;
  if (lease->impl_ == nullptr) {
    throw std::invalid_argument(title() + ": the lease is released; take a new one with lease()");
  }
  if (lease->impl_->table.get() != this) {
    throw std::invalid_argument(title() + ": the lease belongs to " + lease->impl_->table->title() +
                                "; take one from the table that is called");
  }
  return lease->impl_->record.get();
}

}  // namespace recsdk
