// What readers of leavers call.
#include "recsdk/leavers.h"

#include <memory>
#include <utility>

#include "rows/leavers_impl.h"
#include "util/fork_gate.h"

namespace recsdk {

Leavers::Leavers(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Leavers::Leavers(Leavers&& other) noexcept = default;

Leavers& Leavers::operator=(Leavers&& other) noexcept {
  if (this != &other) {
    if (impl_ != nullptr) impl_->queue->close();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

// May come under the table's lock, of a garbage collector there.
Leavers::~Leavers() {
  if (impl_ != nullptr) impl_->queue->close();
}

const LeaversOptions& Leavers::options() const noexcept { return impl_->queue->options(); }
bool Leavers::wait(double seconds) const { return impl_->queue->wait(seconds); }

// Readers are threads of their own, and a fork need not wait for them to end.
std::int64_t Leavers::read(const LeaversBuffer& buffer) {
  const auto gate = internal::hold_off_fork();
  return impl_->queue->read(buffer);
}
std::int64_t Leavers::take(const LeaversBuffer& buffer) {
  const auto gate = internal::hold_off_fork();
  return impl_->queue->take(buffer);
}
void Leavers::free_rows(std::int64_t count) noexcept {
  const auto gate = internal::hold_off_fork();
  impl_->queue->free_rows(count);
}
std::int64_t Leavers::size() const {
  const auto gate = internal::hold_off_fork();
  return impl_->queue->size();
}
std::uint64_t Leavers::num_lost() const {
  const auto gate = internal::hold_off_fork();
  return impl_->queue->num_lost();
}
void Leavers::close() noexcept {
  const auto gate = internal::hold_off_fork();
  impl_->queue->close();
}

// Comes under the table's lock, of who makes rows.
std::uint64_t Leavers::num_ended() const { return impl_->queue->num_ended(); }

}  // namespace recsdk
