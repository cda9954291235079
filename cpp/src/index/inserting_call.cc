// A call that inserts, as a whole: the order of its steps, what takes it back, and what follows
// once it stays.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "index/index_impl.h"
#include "util/memory.h"

namespace recsdk {

using internal::Capacity;
using internal::Insertion;
using internal::LeaseRecord;
using internal::OutcomeCounts;
using internal::RowState;

void Index::Impl::undo(Insertion& insertion) noexcept {
  take_back_rows(insertion);
  if (admission) admission->undo(insertion.admission);
  if (insertion.num_places > 0) leavers->cancel(insertion.num_places);
  if (!evictor) return;
  take_back_measured(insertion);
  evictor->undo_call(insertion.victims, numbers, *capacity);
  for (const internal::Evictor::Victim& expired : insertion.expired) {
    const std::uint64_t hash = Capacity::hash_of(expired.key);
    capacity->add({&hash, 1});
  }
}

void Index::Impl::take_back_rows(const Insertion& insertion) noexcept {
  for (std::size_t j = insertion.rows.size(); j-- > 0;) {
    key_map.erase(numbers.key(insertion.rows[j]));
    numbers.undo_allocate(insertion.rows[j], insertion.old_end);
  }
}

// New memory comes in huge pages, which the system clears at their first touch: up to milliseconds
// each. A large index touches them ahead, about as many a call as the call uses, so that no call
// meets pages of keys and of row numbers together.
void Index::Impl::populate_ahead(std::int64_t num_new) noexcept {
  if (num_new == 0) return;
  constexpr std::int64_t kBytes = 32;  // a key, about
  std::int64_t num_pages = 1 + num_new * kBytes / static_cast<std::int64_t>(internal::kHugePage);
  while (num_pages-- > 0 && (key_map.populate_ahead() || numbers.populate_ahead())) {
  }
}

void Index::Impl::settle(const Insertion& insertion) noexcept {
  if (evictor) {
    capacity->add(insertion.hashes);
  } else if (capacity) {
    capacity->add(insertion.rows, numbers);
  }
  key_map.adapt(static_cast<std::int64_t>(insertion.rows.size()));
  populate_ahead(static_cast<std::int64_t>(insertion.rows.size()));
}

// What reads the keys later may fail where their initial rows are made, and can take nothing back.
void Index::Impl::check_defaults(std::span<const Key> keys, const Outcome* outcomes) const {
  if (config.default_row.kind != DefaultKind::kInitialRow || maker == nullptr || !maker->checks())
    return;
  std::vector<Key> without_row;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!has_row(outcomes[i])) without_row.push_back(keys[i]);
  }
  if (without_row.empty()) return;
  const internal::FairMutex::CallbackScope scope(mutex);
  maker->check(without_row);
}

void Index::Impl::map_inserting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                LeaseRecord* record, const KeyData& data,
                                const internal::Then& then, bool admits_all) {
  const bool in_flight = record != nullptr && record->step.has_value();
  require_open(record);
  if (!in_flight) require_no_steps("inserting without a step");
  Insertion insertion;
  insertion.admits_all = admits_all;
  begin_insertion(keys.size(), insertion, record, data);
  try {
    find_or_insert(keys, rows_out, outcomes, in_flight ? RowState::kInFlight : RowState::kVisible,
                   insertion);
    if (in_flight) {
      std::vector<std::uint32_t>& known = record->new_rows;
      // Doubling, as push_back would.
      const std::size_t needed = known.size() + insertion.rows.size();
      if (known.capacity() < needed) known.reserve(std::max(needed, 2 * known.capacity()));
    }
    if (maker != nullptr && !insertion.rows.empty()) {
      const internal::FairMutex::CallbackScope scope(mutex);
      maker->make({numbers, insertion.rows, in_flight});
    }
    if (then) {
      then();
    } else {
      check_defaults(keys, outcomes);
    }
    require_open(record);  // what makes rows may have released it
    if (admission && !admits_all)
      prepare_admission(outcomes, insertion, in_flight ? record : nullptr);
    prepare_eviction(keys, outcomes, insertion, in_flight ? record : nullptr);
  } catch (...) {
    undo(insertion);
    throw;
  }
  settle(insertion);
  if (evictor) settle_eviction(keys, rows_out, outcomes, insertion, in_flight ? record : nullptr);
  if (admission) settle_admission(outcomes, insertion, in_flight ? record : nullptr);
  if (has_clock()) advance_clock(insertion, in_flight ? record : nullptr);
  point_to_defaults(keys, rows_out, outcomes);
  const OutcomeCounts counts =
      internal::count_outcomes(outcomes, static_cast<std::int64_t>(keys.size()));
  if (!in_flight) {
    note_visible(insertion.rows);
    count(counts);
    return;
  }
  record->new_rows.insert(record->new_rows.end(), insertion.rows.begin(), insertion.rows.end());
  internal::add_counts(record->outcomes, counts);
  num_in_flight += static_cast<std::int64_t>(insertion.rows.size());
}

void Index::Impl::note_visible(std::span<const std::uint32_t> row_numbers) noexcept {
  if (tracker == nullptr) return;
  for (const std::uint32_t row : row_numbers) tracker->note_visible(row, numbers.key(row));
}

}  // namespace recsdk
