// How keys leave for others: whom a call evicts, and what follows for readers.
//
// A call finds its keys and inserts all new ones, then chooses victims for those that are too many.
// All that may fail comes before the first key leaves.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "index/index_impl.h"
#include "util/must.h"
#include "util/prefetch.h"

namespace recsdk {

using internal::Capacity;
using internal::Evictor;
using internal::Insertion;
using internal::kItemsAhead;
using internal::LeaseRecord;
using internal::RowMeta;
using internal::RowState;

// The hashes of the keys that came, in the order of their rows: that of the call.
void Index::Impl::hash_new(std::span<const Key> keys, const Outcome* outcomes,
                           Insertion& insertion) {
  insertion.hashes.resize(insertion.rows.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kInserted) insertion.hashes[count++] = Capacity::hash_of(keys[i]);
  }
}

// Inserts all keys, and chooses who leaves for those that are too many.
void Index::Impl::insert_evicting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                  RowState state, Insertion& insertion) {
  evictor->refresh(numbers, *capacity);
  insert_fitting(keys, rows_out, outcomes, state, insertion);
  if (insertion.rows.empty()) return;
  std::vector<Capacity::Excess> excess;
  hash_new(keys, outcomes, insertion);
  capacity->find_excess(insertion.hashes, excess);
  if (excess.empty()) return;
  evictor->begin_call(numbers, insertion.rows, 2 * keys.size() + insertion.expired.size(),
                      insertion.step > clock.step);
  for (const Evictor::Victim& expired : insertion.expired) evictor->mark(expired.row);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kFound) evictor->mark(rows_out[i]);
  }
  const std::vector<Capacity::Excess> lacking = choose_victims(excess, insertion);
  if (lacking.empty()) return;
  if (config.on_full == OnFull::kRaise) {
    const std::uint32_t group = lacking.front().group;
    throw_full({group, capacity->quota(group), capacity->used(group)});
  }
  refuse_lowest(keys, rows_out, outcomes, state, insertion, lacking);
}

// Returns of which groups too few may leave, and how few.
std::vector<Capacity::Excess> Index::Impl::choose_victims(std::vector<Capacity::Excess>& excess,
                                                          Insertion& insertion) {
  std::sort(excess.begin(), excess.end(),
            [](const auto& a, const auto& b) { return a.group < b.group; });
  std::vector<Capacity::Excess> lacking;
  for (std::size_t i = 0; i < excess.size(); ++i) {
    if (i + 1 < excess.size()) evictor->prefetch(excess[i + 1].group);
    const Capacity::Excess& of_group = excess[i];
    const std::uint32_t num_chosen =
        evictor->choose(of_group, insertion.step, numbers, *capacity, insertion.victims);
    if (num_chosen < of_group.count)
      lacking.push_back({of_group.group, of_group.count - num_chosen});
  }
  evictor->end_call();
  return lacking;
}

// Of the new keys those that would leave first find no room. Which ones shows only once all are in:
// so all are taken back, and the others inserted again.
void Index::Impl::refuse_lowest(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                RowState state, Insertion& insertion,
                                std::span<const Capacity::Excess> lacking) {
  begin_meta(insertion);
  evictor->begin_call(numbers, {}, insertion.rows.size(), false);
  for (const std::uint32_t row : insertion.rows) evictor->mark(row);
  const RowMeta& meta = evictor->meta();
  const KeyData& data = insertion.data;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!has_row(outcomes[i]) || !evictor->is_marked(rows_out[i])) continue;
    meta.touch(numbers.meta(rows_out[i]), insertion.step, RowMeta::occurrence(data, i));
  }
  evictor->end_call();
  std::vector<std::pair<std::uint32_t, Evictor::Place>> places;  // by group
  places.reserve(insertion.rows.size());
  for (const std::uint32_t row : insertion.rows)
    places.emplace_back(capacity->group_of(numbers.key(row)), evictor->place(row, numbers));
  std::sort(places.begin(), places.end());
  std::vector<std::uint64_t> refused;
  for (const Capacity::Excess& of_group : lacking) {
    auto first =
        std::lower_bound(places.begin(), places.end(), std::pair(of_group.group, Evictor::Place()));
    for (std::uint32_t n = 0; n < of_group.count; ++n, ++first)
      refused.push_back(first->second.hash);
  }
  std::sort(refused.begin(), refused.end());
  take_back_rows(insertion);
  insertion.rows.clear();
  insertion.hashes.clear();
  find(keys, rows_out, outcomes);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kMissing &&
        std::binary_search(refused.begin(), refused.end(), Capacity::hash_of(keys[i])))
      outcomes[i] = Outcome::kRefused;
  }
  insert_found(keys, rows_out, outcomes, state, insertion);
}

// The last that may fail.
void Index::Impl::prepare_eviction(std::span<const Key> keys, const Outcome* outcomes,
                                   Insertion& insertion, LeaseRecord* record) {
  if (!evictor) return;
  if (insertion.hashes.size() != insertion.rows.size()) hash_new(keys, outcomes, insertion);
  std::vector<Evictor::Victim> expired_too;
  if (!insertion.expired.empty()) {
    expired_too = insertion.victims;
    expired_too.insert(expired_too.end(), insertion.expired.begin(), insertion.expired.end());
  }
  const std::vector<Evictor::Victim>& victims =
      insertion.expired.empty() ? insertion.victims : expired_too;
  numbers.prepare_free(num_leaving + static_cast<std::int64_t>(victims.size()));
  if (churn) churn->prepare(victims);
  if (record != nullptr) {
    const auto make_room = [](auto& list, std::size_t count) {
      const std::size_t needed = list.size() + count;
      if (list.capacity() < needed) list.reserve(std::max(needed, 2 * list.capacity()));
    };
    make_room(record->evicted, victims.size());
    make_room(record->touched, (keys.size() + insertion.measured.size()) *
                                   static_cast<std::size_t>(evictor->meta().num_words() + 1));
  }
  if (has_reader())
    insertion.num_places = leavers->reserve(static_cast<std::int64_t>(victims.size()));
  if (record != nullptr || tracker == nullptr || victims.empty()) return;
  tracker->note_leaving(internal::left_keys(victims), key_map);
}

// `record` if the call is part of a batch in flight.
void Index::Impl::settle_eviction(std::span<const Key> keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, Insertion& insertion,
                                  LeaseRecord* record) noexcept {
  begin_meta(insertion);
  note_measured(insertion, record);
  if (insertion.kinds_before) note_placed(*insertion.kinds_before, record);
  touch(keys.size(), rows_in, outcomes, insertion, record);
  note_unmeasured(keys.size(), rows_in, outcomes, insertion);
  evictor->add(insertion.rows, insertion.hashes, numbers, *capacity);
  if (churn) count_returned(insertion, record);
  evict_rows(insertion.victims, insertion.step, record);
  if (insertion.expired.empty()) return;
  evict_rows(insertion.expired, insertion.step, record);
  for (const Evictor::Victim& expired : insertion.expired)
    evictor->note_erased(expired.key, numbers, *capacity);
}

void Index::Impl::count_returned(const Insertion& insertion, LeaseRecord* record) noexcept {
  std::uint64_t& count = record == nullptr ? num_returned : record->num_returned;
  count += churn->count_returned(insertion.hashes, insertion.step);
}

void Index::Impl::evict_rows(std::span<const Evictor::Victim> victims, std::int64_t step,
                             LeaseRecord* record) noexcept {
  if (churn) churn->note_left(victims, step);
  const auto ask_for = [&](std::size_t j) {
    if (j >= victims.size()) return;
    key_map.prefetch(victims[j].key);
    numbers.prefetch_state(victims[j].row);
  };
  for (std::size_t j = 0; j < kItemsAhead; ++j) ask_for(j);
  for (std::size_t j = 0; j < victims.size(); ++j) {
    ask_for(j + kItemsAhead);
    const auto [key, row, cause] = victims[j];
    key_map.erase(key);
    if (cause != LeaveCause::kExpired) capacity->remove(key);  // else that is done
    if (record == nullptr) {
      numbers.free(row, next_epoch);
      note_left(key, row, cause);
      count_left(cause);
    } else {
      numbers.set_leaving(row, true);
      record->evicted.push_back({key, row, cause});
    }
  }
  if (record == nullptr) {
    release_kept_rows();
    return;
  }
  num_leaving += static_cast<std::int64_t>(victims.size());
  const auto middle = record->evicted.end() - static_cast<std::ptrdiff_t>(victims.size());
  std::sort(middle, record->evicted.end());
  std::inplace_merge(record->evicted.begin(), middle, record->evicted.end());
}

// The row of a key that a batch in flight has evicted, while readers still see it.
std::optional<std::uint32_t> Index::Impl::find_leaving(Key key) const noexcept {
  for (const auto& record : open_steps) {
    auto entry =
        std::lower_bound(record->evicted.begin(), record->evicted.end(), Evictor::Victim{key, 0});
    for (; entry != record->evicted.end() && entry->key == key; ++entry) {
      if (numbers.state(entry->row) == RowState::kVisible) return entry->row;
    }
  }
  return std::nullopt;
}

// What a batch evicted leaves for readers too.
void Index::Impl::publish_evicted(const LeaseRecord& record) noexcept {
  for (const Evictor::Victim& evicted : record.evicted) {
    numbers.set_leaving(evicted.row, false);
    numbers.free(evicted.row, next_epoch);
    note_left(evicted.key, evicted.row, evicted.cause);
    count_left(evicted.cause);
    if (tracker == nullptr) continue;
    try {
      tracker->note_left(evicted.key, evicted.cause);
    } catch (const std::exception&) {
      has_parent = false;  // no memory for the changes: the next cut must be of all keys
    }
  }
  num_leaving -= static_cast<std::int64_t>(record.evicted.size());
  if (tracker == nullptr) return;
  if (record.kinds_before) note_shifted(*record.kinds_before);
  const auto words = static_cast<std::size_t>(evictor->meta().num_words()) + 1;
  for (std::size_t i = 0; i < record.touched.size(); i += words)
    tracker->note_changed(record.touched[i]);
}

std::int64_t Index::Impl::evict(std::int64_t max_rows, bool is_dry) {
  if (!evictor) {
    throw std::invalid_argument(title + ": evict needs a rule who leaves; set eviction");
  }
  if (max_rows < 0) {
    throw std::invalid_argument(title + ": " +
                                internal::must("max_rows of evict", "be 0 or more", max_rows));
  }
  require_no_steps("evict");
  Insertion none;
  none.step = step_of(std::nullopt);
  std::vector<Capacity::Excess> excess = capacity->find_excess(max_rows);
  std::size_t num_victims = 0;
  for (const Capacity::Excess& of_group : excess) num_victims += of_group.count;
  try {
    none.victims.reserve(num_victims);
    evictor->refresh(numbers, *capacity);
    evictor->begin_call(numbers, {}, num_victims, none.step > clock.step);
    choose_victims(excess, none);
    if (!is_dry) prepare_eviction({}, nullptr, none, nullptr);
  } catch (...) {
    undo(none);
    throw;
  }
  if (is_dry) {
    undo(none);
  } else {
    evict_rows(none.victims, clock.step, nullptr);
  }
  return static_cast<std::int64_t>(none.victims.size());
}

std::int64_t Index::evict(std::int64_t max_rows) {
  const std::unique_lock lock(impl_->mutex);
  return impl_->evict(max_rows);
}

// All that may fail comes before the first key leaves.
std::int64_t Index::Impl::evict_chosen(std::span<const Evictor::Victim> chosen) {
  const auto count = static_cast<std::int64_t>(chosen.size());
  numbers.prepare_free(count);
  if (churn) churn->prepare(chosen);
  const std::int64_t num_places = has_reader() ? leavers->reserve(count) : 0;
  note_leaving(num_places, [&] { tracker->note_leaving(internal::left_keys(chosen), key_map); });
  for (const Evictor::Victim& each : chosen) {
    if (each.cause == LeaveCause::kExpired) capacity->remove(each.key);
  }
  evict_rows(chosen, clock.step, nullptr);
  for (const auto& each : chosen) evictor->note_erased(each.key, numbers, *capacity);
  return count;
}

}  // namespace recsdk
