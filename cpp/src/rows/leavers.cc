// What readers of leavers call.
#include "recsdk/leavers.h"

#include <memory>
#include <utility>

#include "rows/leavers_impl.h"

namespace recsdk {

Leavers::Leavers(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Leavers::Leavers(Leavers&& other) noexcept = default;

Leavers& Leavers::operator=(Leavers&& other) noexcept {
  if (this != &other) {
    if (impl_ != nullptr) close();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

Leavers::~Leavers() {
  if (impl_ != nullptr) close();
}

const LeaversOptions& Leavers::options() const noexcept { return impl_->queue->options(); }
std::int64_t Leavers::read(const LeaversBuffer& buffer) { return impl_->queue->read(buffer); }
std::int64_t Leavers::take(const LeaversBuffer& buffer) { return impl_->queue->take(buffer); }
void Leavers::free_rows(std::int64_t count) noexcept { impl_->queue->free_rows(count); }
bool Leavers::wait(double seconds) const { return impl_->queue->wait(seconds); }
std::int64_t Leavers::size() const { return impl_->queue->size(); }
std::uint64_t Leavers::num_lost() const { return impl_->queue->num_lost(); }
std::uint64_t Leavers::num_ended() const { return impl_->queue->num_ended(); }
void Leavers::close() noexcept { impl_->queue->close(); }

}  // namespace recsdk
