// What an index tells whoever reads the keys that leave.
#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "index/index_impl.h"
#include "rows/leavers_impl.h"

namespace recsdk {

using internal::LeaverQueue;

Leavers Index::leavers(const LeaversOptions& options) {
  if (impl_->is_of_table) {
    throw std::invalid_argument(impl_->title +
                                ": the rows that leave are the table's; read them by "
                                "Table::leavers");
  }
  auto queue = std::make_shared<LeaverQueue>(options, impl_->title, std::nullopt);
  auto made = std::make_unique<Leavers::Impl>(Leavers::Impl{queue});
  impl_->open_reader(std::move(queue), [](LeaverQueue& of, std::uint64_t epoch) {
    of.copy_before(epoch, [](std::uint32_t, float*, float*) {});  // the caller has the rows
  });
  return Leavers(std::move(made));
}

bool Index::Impl::has_reader() noexcept {
  if (leavers != nullptr && leavers->is_closed()) leavers.reset();
  return leavers != nullptr;
}

void Index::Impl::open_reader(std::shared_ptr<LeaverQueue> queue,
                              std::function<void(LeaverQueue&, std::uint64_t)> copy) {
  const std::unique_lock lock(mutex);
  require_no_steps("leavers");
  if (has_reader()) {
    throw Error(ErrorCode::kBusy, title +
                                      ": somebody reads what leaves already; close that reader "
                                      "first, or let it pass on what it reads");
  }
  copy_left = std::move(copy);
  ends_at_once = true;
  leavers = std::move(queue);
}

void Index::Impl::close_reader() noexcept {
  if (leavers == nullptr) return;
  const std::unique_lock lock(mutex);
  leavers->close();
  leavers.reset();
}

void Index::Impl::note_left(Key key, std::uint32_t row, LeaveCause cause) noexcept {
  if (leavers != nullptr) leavers->note(key, row, cause, next_epoch);
}

// Tells the tracker of changes; if that fails, nobody leaves.
void Index::Impl::note_leaving(std::int64_t num_places, const internal::Then& note) {
  if (tracker == nullptr) return;
  try {
    note();
  } catch (...) {
    if (num_places > 0) leavers->cancel(num_places);
    throw;
  }
}

void Index::Impl::prepare_erasing(std::span<const Key> keys) {
  const std::int64_t num_places = has_reader() ? reserve_places(keys) : 0;
  note_leaving(num_places, [&] {
    std::vector<internal::LeftKey> leaving(keys.size());
    std::transform(keys.begin(), keys.end(), leaving.begin(),
                   [](Key key) { return internal::LeftKey{LeaveCause::kErased, key}; });
    tracker->note_leaving(leaving, key_map);
  });
}

// For those of the keys that are there.
std::int64_t Index::Impl::reserve_places(std::span<const Key> keys) {
  std::vector<Key> there;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(there),
               [&](Key key) { return key_map.find_one(key).has_value(); });
  std::sort(there.begin(), there.end());
  const auto num_distinct = std::unique(there.begin(), there.end()) - there.begin();
  return leavers->reserve(static_cast<std::int64_t>(num_distinct));
}

}  // namespace recsdk
