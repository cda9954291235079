#include "eviction/departures.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "util/prefetch.h"

namespace recsdk::internal {

void Departures::reserve(std::size_t count, const SeededHash& mix) {
  constexpr std::size_t kFewInVain = 64;
  constexpr std::size_t kMostNumber = std::numeric_limits<std::uint32_t>::max();
  const bool has_numbers = list_.size() + count <= kMostNumber - base_;
  if (!has_numbers || list_.size() - first_ > 2 * std::size_t{used_} + kFewInVain) renumber(mix);
  if (list_.size() + count > list_.capacity()) {
    drop_front();
    const std::size_t half_more = list_.size() + count + list_.size() / 2;
    if (half_more > list_.capacity()) list_.reserve(half_more);
  }
  grow_slots(std::min(used_ + count, std::size_t{most_}));
}

// At most three quarters of the slots are used.
void Departures::grow_slots(std::size_t count) {
  if (4 * count <= 3 * slots_.size()) return;
  std::vector<Slot> larger(std::bit_ceil(count + count / 3 + 1));
  const std::vector<Slot> before = std::exchange(slots_, std::move(larger));
  for (const Slot& each : before) {
    if (each.number == kNone) continue;
    std::size_t slot = home(each.mixed);
    while (slots_[slot].number != kNone) slot = next(slot);
    slots_[slot] = each;
  }
}

void Departures::drop_front() noexcept {
  list_.erase(list_.begin(), list_.begin() + static_cast<std::ptrdiff_t>(first_));
  base_ += static_cast<std::uint32_t>(first_);
  first_ = 0;
}

// Takes places that are in vain out of the list, and numbers the others from 1.
void Departures::renumber(const SeededHash& mix) noexcept {
  std::size_t count = 0;
  for (std::size_t place = first_; place < list_.size(); ++place) {
    if (unlink(place, mix)) list_[count++] = list_[place];
  }
  list_.resize(count);
  first_ = 0;
  base_ = 1;
  for (std::size_t place = 0; place < count; ++place) link(place, mix);
}

void Departures::link(std::size_t place, const SeededHash& mix) noexcept {
  const std::uint32_t of = mixed(list_[place].hash, mix);
  std::size_t slot = home(of);
  while (slots_[slot].number != kNone) slot = next(slot);
  slots_[slot] = {number(place), of};
  ++used_;
}

// False if its place is in vain.
bool Departures::unlink(std::size_t place, const SeededHash& mix) noexcept {
  for (std::size_t slot = home(mixed(list_[place].hash, mix)); slots_[slot].number != kNone;
       slot = next(slot)) {
    if (slots_[slot].number != number(place)) continue;
    empty_slot(slot);
    return true;
  }
  return false;
}

// Those behind it close up, so that none is behind an empty slot that is not before its home.
void Departures::empty_slot(std::size_t slot) noexcept {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t from = next(slot); slots_[from].number != kNone; from = next(from)) {
    if (((from - home(slots_[from].mixed)) & mask) < ((from - slot) & mask)) continue;
    slots_[slot] = slots_[from];
    slot = from;
  }
  slots_[slot] = {};
  --used_;
}

std::optional<std::int64_t> Departures::take(std::uint64_t hash, const SeededHash& mix) noexcept {
  if (used_ == 0) return std::nullopt;
  const std::uint32_t of = mixed(hash, mix);
  for (std::size_t slot = home(of); slots_[slot].number != kNone; slot = next(slot)) {
    if (slots_[slot].mixed != of) continue;
    const Leaving found = list_[slots_[slot].number - base_];
    if (found.hash != hash) continue;
    empty_slot(slot);
    return found.step;
  }
  return std::nullopt;
}

void Departures::prefetch_all(std::span<const std::uint64_t> hashes,
                              const SeededHash& mix) const noexcept {
  const std::size_t last = std::min(first_ + hashes.size(), list_.size());
  for (std::size_t place = first_; place < last; ++place) prefetch(list_[place].hash, mix);
  for (const std::uint64_t hash : hashes) prefetch(hash, mix);
}

// False if its place was in vain.
bool Departures::forget_first(const SeededHash& mix) noexcept {
  if (first_ + kItemsAhead < list_.size()) prefetch(list_[first_ + kItemsAhead].hash, mix);
  return unlink(first_++, mix);
}

std::uint64_t Departures::add(std::span<const std::uint64_t> hashes, std::int64_t step,
                              std::int64_t steps, const SeededHash& mix) noexcept {
  while (first_ < list_.size() && is_over(list_[first_].step, step, steps)) forget_first(mix);
  const std::uint64_t wanted = used_ + std::uint64_t{hashes.size()};
  const std::uint64_t num_lost = wanted - std::min(wanted, std::uint64_t{most_});
  for (std::uint64_t lost = 0; lost < num_lost;) {
    const bool has_first = used_ > 0;
    if (has_first && list_[first_] < Leaving{step, hashes.front()}) {
      lost += static_cast<std::uint64_t>(forget_first(mix));
    } else {
      hashes = hashes.subspan(1);
      ++lost;
    }
  }
  append(hashes, step, mix);
  return num_lost;
}

// Those that left earlier in the step may lie between: their places are others then.
void Departures::append(std::span<const std::uint64_t> hashes, std::int64_t step,
                        const SeededHash& mix) noexcept {
  if (hashes.empty()) return;
  const auto begin = list_.begin() + static_cast<std::ptrdiff_t>(first_);
  const Leaving lowest{step, hashes.front()};
  const bool are_last = begin == list_.end() || list_.back() < lowest;
  const auto from = are_last ? list_.end() : std::upper_bound(begin, list_.end(), lowest);
  const auto first_moved = static_cast<std::size_t>(from - list_.begin());
  std::size_t middle = first_moved;
  for (std::size_t place = first_moved; place < list_.size(); ++place) {
    if (unlink(place, mix)) list_[middle++] = list_[place];
  }
  list_.resize(middle);
  for (const std::uint64_t hash : hashes) list_.push_back({step, hash});  // there is room
  const auto moved = list_.begin() + static_cast<std::ptrdiff_t>(first_moved);
  std::inplace_merge(moved, list_.begin() + static_cast<std::ptrdiff_t>(middle), list_.end());
  for (std::size_t place = first_moved; place < list_.size(); ++place) {
    if (place + kItemsAhead < list_.size()) prefetch(list_[place + kItemsAhead].hash, mix);
    link(place, mix);
  }
}

void Departures::clear() noexcept { *this = Departures(most_); }

std::string Departures::find_broken(const KeyMap& rows, const SeededHash& mix) const {
  if (first_ > list_.size() ||
      !std::is_sorted(list_.begin() + static_cast<std::ptrdiff_t>(first_), list_.end()))
    return "the list of keys that left is out of order";
  std::uint32_t num_slots = 0;
  for (const Slot& slot : slots_) {
    if (slot.number == kNone) continue;
    ++num_slots;
    const std::size_t place = slot.number - base_;
    if (place < first_ || place >= list_.size()) return "a key that left has no place in the list";
    if (slot.mixed != mixed(list_[place].hash, mix)) return "a key that left has another's place";
    const auto key = static_cast<Key>(virtual_shard_key(list_[place].hash));
    if (rows.find_one(key))
      return "key " + std::to_string(key) + " has a row and is among those that left";
    for (std::size_t at = home(slot.mixed); &slots_[at] != &slot; at = next(at)) {
      if (slots_[at].number == kNone) return "a key that left would not be found";
    }
  }
  return num_slots == used_ && used_ <= most_ ? "" : "a group has another number of keys that left";
}

}  // namespace recsdk::internal
