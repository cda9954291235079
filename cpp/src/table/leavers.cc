// Reading what leaves a table.
#include "recsdk/leavers.h"

#include <mutex>
#include <shared_mutex>
#include <utility>

#include "rows/leaver_queue.h"
#include "rows/row_values.h"
#include "table/table_impl.h"

namespace recsdk {

using internal::LeaverQueue;

struct Leavers::Impl {
  std::shared_ptr<LeaverQueue> queue;
};

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
bool Leavers::wait(double seconds) const { return impl_->queue->wait(seconds); }
std::int64_t Leavers::size() const { return impl_->queue->size(); }
std::uint64_t Leavers::num_lost() const { return impl_->queue->num_lost(); }
void Leavers::close() noexcept { impl_->queue->close(); }

Leavers Table::leavers(const LeaversOptions& options) {
  Impl& t = *impl_;
  auto queue =
      std::make_shared<LeaverQueue>(options, t.title(), t.config.dim, t.layout.state_width());
  auto made = std::make_unique<Leavers::Impl>(Leavers::Impl{queue});
  const std::unique_lock lock(t.index.mutex);
  t.index.require_no_steps("leavers");
  if (t.index.has_reader()) {
    throw Error(ErrorCode::kBusy, t.title() +
                                      ": somebody reads what leaves already; close that reader "
                                      "first, or let it pass on what it reads");
  }
  t.index.copy_left = [&t](LeaverQueue& of, std::uint64_t epoch) { t.copy_left(of, epoch); };
  t.index.leavers = std::move(queue);
  return Leavers(std::move(made));
}

void Table::Impl::copy_left(LeaverQueue& queue, std::uint64_t epoch) noexcept {
  const std::shared_lock rows_lock(rows_mutex);
  const internal::RowAddresses records = rows.records();
  queue.copy_before(epoch, [&](std::uint32_t row, float* weights, float* state) {
    internal::read_weights(layout, records, row, weights);
    internal::read_state(layout, records, row, state);
  });
}

}  // namespace recsdk
