// Reading what leaves a table.
#include "recsdk/leavers.h"

#include <memory>
#include <shared_mutex>
#include <utility>

#include "rows/leaver_queue.h"
#include "rows/leavers_impl.h"
#include "rows/row_values.h"
#include "table/table_impl.h"

namespace recsdk {

using internal::LeaverQueue;

Leavers Table::leavers(const LeaversOptions& options) {
  Impl& t = *impl_;
  auto queue = std::make_shared<LeaverQueue>(
      options, t.title(), LeaverQueue::Widths{t.config.dim, t.layout.state_width()});
  auto made = std::make_unique<Leavers::Impl>(Leavers::Impl{queue});
  t.index.open_reader(std::move(queue),
                      [&t](LeaverQueue& of, std::uint64_t epoch) { t.copy_left(of, epoch); });
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
