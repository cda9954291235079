#include "index/change_tracker.h"

#include <algorithm>

namespace recsdk::internal {

void ChangeTracker::note_leaving(std::span<const LeftKey> keys, const KeyMap& index) {
  std::vector<Key> added;
  added.reserve(keys.size());
  try {
    for (const auto& [cause, key] : keys) {
      if (!index.find_one(key) || left_.find_one(key)) continue;
      note_left(key, cause);
      added.push_back(key);
    }
  } catch (...) {
    for (const Key key : added) left_.erase(key);
    throw;
  }
}

void ChangeTracker::note_all_erased(const KeyMap& index) {
  std::vector<LeftKey> keys;
  keys.reserve(static_cast<std::size_t>(index.size()));
  index.for_each([&](Key key, std::uint32_t) { keys.push_back({LeaveCause::kErased, key}); });
  note_leaving(keys, index);
}

std::vector<LeftKey> ChangeTracker::left() const {
  std::vector<LeftKey> keys;
  keys.reserve(static_cast<std::size_t>(left_.size()));
  left_.for_each(
      [&](Key key, std::uint32_t cause) { keys.push_back({static_cast<LeaveCause>(cause), key}); });
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace recsdk::internal
