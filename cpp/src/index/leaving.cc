// What an index tells whoever reads the keys that leave.
#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

#include "index/index_impl.h"

namespace recsdk {

bool Index::Impl::has_reader() noexcept {
  if (leavers != nullptr && leavers->is_closed()) leavers.reset();
  return leavers != nullptr;
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
