// How keys leave for others: what a call changes of their metadata, and which it evicts.
//
// A call finds its keys and inserts all new ones, then chooses victims for those that are too many.
// All that may fail comes before the first key leaves.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "index/index_impl.h"

namespace recsdk {

using internal::Capacity;
using internal::Evictor;
using internal::Insertion;
using internal::LeaseRecord;
using internal::RowMeta;
using internal::RowState;

namespace {

constexpr std::size_t kAhead = 16;

// Saturates, for steps may be any numbers.
std::int64_t later(std::int64_t step, std::int64_t by) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(step, by, &sum) ? INT64_MAX : sum;
}

}  // namespace

void Index::Impl::check_data(std::size_t num_keys, const KeyData& data, bool insert,
                             bool admits_all) const {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": " + what);
  };
  const bool is_by_time = evictor && evictor->meta().is_by_time();
  const bool is_by_score = evictor && evictor->meta().is_by_score();
  if (!data.times.empty() && !(insert && is_by_time))
    fail("times are given, and only calls that insert, with eviction by time, take them");
  if (!data.scores.empty() && !(insert && is_by_score))
    fail("scores are given, and only calls that insert, with eviction by score, take them");
  if (data.times.size() > 1 && data.times.size() != num_keys)
    fail("times has " + std::to_string(data.times.size()) + " elements for " +
         std::to_string(num_keys) + " keys; pass one per key, or one for all");
  if (!data.scores.empty() && data.scores.size() != num_keys)
    fail("scores has " + std::to_string(data.scores.size()) + " elements for " +
         std::to_string(num_keys) + " keys; pass one per key");
  check_counts(num_keys, data, insert);
  check_clicks(num_keys, data, insert, admits_all);
  const bool is_finite = std::all_of(data.scores.begin(), data.scores.end(),
                                     [](float score) { return std::isfinite(score); });
  if (!is_finite) fail("a score is infinite or not a number; pass finite ones");
}

// A call without a step is a step of its own, after the latest.
std::int64_t Index::Impl::step_of(const LeaseRecord* record) const {
  if (record == nullptr || !record->step) return later(clock.step, 1);
  if (!clock.lease_step) return clock.is_begun ? later(clock.step, 1) : *record->step;
  std::int64_t steps = 0;
  const bool is_far = __builtin_sub_overflow(*record->step, *clock.lease_step, &steps);
  return later(clock.step, is_far ? INT64_MAX : steps);
}

void Index::Impl::begin_insertion(std::size_t num_keys, Insertion& insertion,
                                  const LeaseRecord* record, const KeyData& data) const {
  if (!has_clock()) return;
  if (record != nullptr && record->step && clock.lease_step && *record->step < *clock.lease_step) {
    // It might evict what a later batch has inserted and is to make visible.
    throw std::invalid_argument(
        title + ": a batch of step " + std::to_string(*record->step) +
        " is mapped after one of step " + std::to_string(*clock.lease_step) +
        "; with eviction or admission, map batches in ascending order of steps");
  }
  insertion.data = data;
  insertion.step = step_of(record);
  if (evictor && evictor->meta().is_by_norm() && is_look_due(insertion.step))
    require_trained(record);
  if (!evictor || !evictor->meta().is_by_time() || !data.times.empty()) return;
  if (!time) {
    if (num_keys == 0) return;
    throw std::invalid_argument(title +
                                ": eviction goes by time, and the call brings none; pass times, or "
                                "set a time before");
  }
  insertion.data.times = {&*time, 1};
}

// Norms depend on what all batches before have trained.
void Index::Impl::require_trained(const LeaseRecord* record) const {
  for (const auto& open : open_steps) {
    if (open.get() == record || open->is_released) continue;
    if (record != nullptr && open->step == record->step) continue;
    throw Error(ErrorCode::kBusy,
                title + ": a step begins with a look at the norms of rows, and the batch of step " +
                    std::to_string(*open->step) +
                    " is still in flight; train or drop it, and release its lease, before the "
                    "next batch is mapped");
  }
}

// What a look finds of rows: their norms, or what the caller's function makes of them.
std::vector<float> Index::Impl::measured(std::span<const std::uint32_t> rows) {
  if (!evictor->meta().is_by_norm()) return places(rows);
  std::vector<float> norms(rows.size());
  const internal::FairMutex::CallbackScope scope(mutex);
  maker->norms(rows, norms);
  return norms;
}

std::vector<float> Index::Impl::places(std::span<const std::uint32_t> rows) {
  constexpr std::size_t kKeysAtOnce = 65'536;
  std::vector<float> found;
  found.reserve(rows.size());
  std::vector<double> piece;
  for (std::size_t begin = 0; begin < rows.size(); begin += kKeysAtOnce) {
    RowMeta::Columns columns;
    for (const std::uint32_t row : rows.subspan(begin, std::min(kKeysAtOnce, rows.size() - begin)))
      evictor->meta().add_columns(numbers.meta(row), columns);
    piece.assign(columns.steps.size(), 0.0);
    {
      const internal::FairMutex::CallbackScope scope(mutex);
      config.eviction->function(
          {clock.step, columns.steps, columns.times, columns.counts, columns.scores}, piece);
    }
    for (const double place : piece) {
      found.push_back(static_cast<float>(place));
      if (!std::isfinite(found.back()))
        throw std::invalid_argument(title +
                                    ": the function of eviction gave a number that is not finite "
                                    "in single precision; have it give others");
    }
  }
  return found;
}

// At a look all rows are measured and filed anew.
void Index::Impl::measure(Insertion& insertion) {
  const RowMeta& meta = evictor->meta();
  if (!meta.is_measured() || !is_look_due(insertion.step)) return;
  std::vector<std::uint32_t> rows;
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) != RowState::kFree && !numbers.is_leaving(row))
      rows.push_back(static_cast<std::uint32_t>(row));
  }
  const std::vector<float> found = measured(rows);
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  insertion.measured.reserve(rows.size() * (num_words + 1));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::int64_t* const words = numbers.meta(rows[i]);
    insertion.measured.push_back(rows[i]);
    insertion.measured.insert(insertion.measured.end(), words, words + num_words);
    if (!meta.set_measured(words, found[i]))
      insertion.measured.resize(insertion.measured.size() - num_words - 1);
  }
  evictor->forget();
}

void Index::Impl::take_back_measured(const Insertion& insertion) noexcept {
  const auto stride = static_cast<std::size_t>(evictor->meta().num_words()) + 1;
  for (std::size_t i = 0; i < insertion.measured.size(); i += stride)
    std::copy_n(&insertion.measured[i + 1], stride - 1, numbers.meta(insertion.measured[i]));
  if (!insertion.measured.empty()) evictor->forget();
}

// What was measured is seen by readers, and is in the next cut of changes, as what a call touches.
void Index::Impl::note_measured(const Insertion& insertion, LeaseRecord* record) noexcept {
  const std::vector<std::int64_t>& measured = insertion.measured;
  if (record != nullptr) {  // there is room
    record->touched.insert(record->touched.end(), measured.begin(), measured.end());
    return;
  }
  if (tracker == nullptr) return;
  const auto stride = static_cast<std::size_t>(evictor->meta().num_words()) + 1;
  for (std::size_t i = 0; i < measured.size(); i += stride) tracker->note_changed(measured[i]);
}

// The rows that came get fresh metadata.
void Index::Impl::begin_meta(const Insertion& insertion) noexcept {
  const std::span<const std::uint32_t> rows = insertion.rows;
  const bool has_scores = !insertion.data.scores.empty();
  for (std::size_t j = 0; j < rows.size(); ++j) {
    if (j + kAhead < rows.size()) numbers.prefetch_meta(rows[j + kAhead]);
    evictor->meta().begin(numbers.meta(rows[j]), insertion.step, has_scores);
  }
}

// Runs with the words of each row that a key of the call has.
template <typename Body>
void Index::Impl::for_touched(std::size_t num_keys, const RowNumber* rows_in,
                              const Outcome* outcomes, const Body& body) const noexcept {
  constexpr std::size_t kFar = 32;
  const internal::RowAddresses records = numbers.meta();
  for (std::size_t i = 0; i < num_keys; ++i) {
    // A key without a row has number 0: one more line is faster than a branch.
    if (i + kFar < num_keys) internal::prefetch_line(records.record(rows_in[i + kFar]));
    if (has_row(outcomes[i])) body(i, reinterpret_cast<std::int64_t*>(records.record(rows_in[i])));
  }
}

// Remembers what a batch in flight finds, before each is touched by `touch`.
template <typename Touch>
void Index::Impl::touch_in_flight(std::size_t num_keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, std::int64_t step, LeaseRecord& record,
                                  const Touch& touch) noexcept {
  const RowMeta& meta = evictor->meta();
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  const std::size_t old_size = record.touched.size();
  record.touched.resize(old_size + num_keys * (num_words + 1));  // there is room
  std::int64_t* next = record.touched.data() + old_size;
  for_touched(num_keys, rows_in, outcomes, [&](std::size_t i, std::int64_t* words) {
    if (record.shares_step || meta.step(words) != step) {
      *next++ = rows_in[i];
      next = std::copy_n(words, num_words, next);
    }
    touch(i, words);
  });
  record.touched.resize(static_cast<std::size_t>(next - record.touched.data()));
}

template <typename Touch>
void Index::Impl::touch_all(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                            std::int64_t step, LeaseRecord* record, const Touch& touch) noexcept {
  if (record != nullptr) {
    touch_in_flight(num_keys, rows_in, outcomes, step, *record, touch);
    return;
  }
  for_touched(num_keys, rows_in, outcomes, touch);
  if (tracker == nullptr) return;
  for (std::size_t i = 0; i < num_keys; ++i) {
    if (has_row(outcomes[i])) tracker->note_changed(rows_in[i]);
  }
}

void Index::Impl::touch(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                        const Insertion& insertion, LeaseRecord* record) noexcept {
  const RowMeta& meta = evictor->meta();
  if (!insertion.data.scores.empty() || meta.may_round_down()) {
    const auto touch = [&](std::size_t i, std::int64_t* words) {
      const std::uint64_t before = meta.order(words);
      meta.touch(words, insertion.step, RowMeta::occurrence(insertion.data, i));
      if (meta.order(words) >= before) return;
      evictor->note_fallen(static_cast<std::uint32_t>(rows_in[i]), numbers, *capacity);
    };
    return touch_all(num_keys, rows_in, outcomes, insertion.step, record, touch);
  }
  meta.with_touch(insertion.data, insertion.step, [&](const auto& touch) {
    touch_all(num_keys, rows_in, outcomes, insertion.step, record, touch);
  });
}

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
  evictor->begin_call(numbers, insertion.rows, 2 * keys.size() + insertion.expired.size());
  for (const Evictor::Victim& expired : insertion.expired) evictor->mark(expired.row);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kFound) evictor->mark(rows_out[i]);
  }
  const std::vector<Capacity::Excess> lacking = choose_victims(excess, insertion);
  if (lacking.empty()) return;
  if (config.on_full == OnFull::kRaise) {
    const auto group = static_cast<std::int64_t>(lacking.front().group);
    throw_full({group, capacity->quota(lacking.front().group)});
  }
  refuse_lowest(keys, rows_out, outcomes, state, insertion, lacking);
}

// Returns of which groups too few may leave, and how few.
std::vector<Capacity::Excess> Index::Impl::choose_victims(std::vector<Capacity::Excess>& excess,
                                                          Insertion& insertion) {
  std::sort(excess.begin(), excess.end(),
            [](const auto& a, const auto& b) { return a.group < b.group; });
  std::vector<Capacity::Excess> lacking;
  for (const Capacity::Excess& of_group : excess) {
    const std::uint32_t num_chosen =
        evictor->choose(of_group, insertion.step, numbers, *capacity, insertion.victims);
    if (num_chosen < of_group.count)
      lacking.push_back({of_group.group, of_group.count - num_chosen});
  }
  evictor->end_call();
  return lacking;
}

// Of the new keys those find no room that would leave first. Who they are shows once all are in: so
// they are taken back, and the others inserted again.
void Index::Impl::refuse_lowest(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                RowState state, Insertion& insertion,
                                std::span<const Capacity::Excess> lacking) {
  begin_meta(insertion);
  evictor->begin_call(numbers, {}, insertion.rows.size());
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
  if (churn) churn->prepare(victims.size());
  if (record != nullptr) {
    const auto make_room = [](auto& list, std::size_t count) {
      const std::size_t needed = list.size() + count;
      if (list.capacity() < needed) list.reserve(std::max(needed, 2 * list.capacity()));
    };
    make_room(record->evicted, victims.size());
    make_room(record->touched,
              keys.size() * static_cast<std::size_t>(evictor->meta().num_words() + 1) +
                  insertion.measured.size());
  }
  if (has_reader())
    insertion.num_places = leavers->reserve(static_cast<std::int64_t>(victims.size()));
  if (record != nullptr || tracker == nullptr || victims.empty()) return;
  tracker->note_leaving(internal::left_keys(victims), key_map);
}

// `record` if the call is part of a batch in flight.
void Index::Impl::settle_eviction(std::span<const Key> keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, const Insertion& insertion,
                                  LeaseRecord* record) noexcept {
  begin_meta(insertion);
  note_measured(insertion, record);
  touch(keys.size(), rows_in, outcomes, insertion, record);
  evictor->add(insertion.rows, insertion.hashes, numbers, *capacity);
  if (churn) count_returned(insertion, record);
  evict_rows(insertion.victims, insertion.step, record);
  if (insertion.expired.empty()) return;
  evict_rows(insertion.expired, insertion.step, record);
  for (const Evictor::Victim& expired : insertion.expired)
    evictor->note_erased(expired.key, numbers, *capacity);
}

void Index::Impl::advance_clock(const Insertion& insertion, LeaseRecord* record) noexcept {
  if (record != nullptr && !record->clock_before) record->clock_before = clock;
  clock = {insertion.step, record == nullptr ? std::nullopt : record->step, true};
}

void Index::Impl::count_returned(const Insertion& insertion, LeaseRecord* record) noexcept {
  std::uint64_t& count = record == nullptr ? num_returned : record->num_returned;
  for (const std::uint32_t row : insertion.rows)
    count += static_cast<std::uint64_t>(churn->comes_back(numbers.key(row), insertion.step));
}

void Index::Impl::evict_rows(std::span<const Evictor::Victim> victims, std::int64_t step,
                             LeaseRecord* record) noexcept {
  if (churn) churn->note_left(victims, step);
  for (std::size_t j = 0; j < std::min(kAhead, victims.size()); ++j)
    key_map.prefetch(victims[j].key);
  for (std::size_t j = 0; j < victims.size(); ++j) {
    if (j + kAhead < victims.size()) key_map.prefetch(victims[j + kAhead].key);
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
  if (tracker == nullptr || record.touched.empty()) return;
  const auto words = static_cast<std::size_t>(evictor->meta().num_words()) + 1;
  for (std::size_t i = 0; i < record.touched.size(); i += words)
    tracker->note_changed(record.touched[i]);
}

std::int64_t Index::Impl::evict(std::int64_t max_rows, bool is_dry) {
  if (!evictor) {
    throw std::invalid_argument(title + ": evict needs a rule who leaves; set eviction");
  }
  if (max_rows < 0) {
    throw std::invalid_argument(title + ": evict cannot leave " + std::to_string(max_rows) +
                                " rows; pass 0 or more");
  }
  require_no_steps("evict");
  Insertion none;
  none.step = step_of(nullptr);
  std::vector<Capacity::Excess> excess = capacity->find_excess(max_rows);
  std::size_t num_victims = 0;
  for (const Capacity::Excess& of_group : excess) num_victims += of_group.count;
  try {
    none.victims.reserve(num_victims);
    evictor->refresh(numbers, *capacity);
    evictor->begin_call(numbers, {}, num_victims);
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

std::vector<Evictor::Victim> Index::Impl::find_expired(std::int64_t step) const {
  const RowMeta& meta = evictor->meta();
  const auto for_each = [&](const auto& body) {
    for (RowNumber row = 0; row < numbers.end(); ++row) {
      if (numbers.state(row) != RowState::kFree && !numbers.is_leaving(row))
        body(static_cast<std::uint32_t>(row), numbers.meta(row));
    }
  };
  // The latest of the keys' times if none is set, or it lies before.
  std::int64_t now = time.value_or(std::numeric_limits<std::int64_t>::min());
  if (meta.is_by_time()) {
    for_each([&](std::uint32_t /*row*/, const std::int64_t* words) {
      now = std::max(now, meta.time(words));
    });
  }
  std::vector<Evictor::Victim> expired;
  for_each([&](std::uint32_t row, const std::int64_t* words) {
    if (meta.has_expired(words, clock.step, now) && meta.may_leave(words, step))
      expired.push_back({numbers.key(row), row, LeaveCause::kExpired});
  });
  if (meta.share()) add_share(*meta.share(), step, now, expired);
  return expired;
}

// The first call of a step that is due takes out who has expired, but for the keys that it brings.
// They leave when the call is settled; until then they are only not counted.
void Index::Impl::take_expired(std::span<const Key> keys, Insertion& insertion) {
  if (!evictor->meta().expires() || !is_look_due(insertion.step)) return;
  std::vector<Evictor::Victim> expired = find_expired(insertion.step);
  if (expired.empty()) return;
  internal::Found found(keys.size(), {});
  find(keys, found.rows.data(), found.outcomes.data());
  std::vector<RowNumber> seen;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (found.outcomes[i] == Outcome::kFound) seen.push_back(found.rows[i]);
  }
  std::sort(seen.begin(), seen.end());
  std::erase_if(expired, [&](const Evictor::Victim& each) {
    return std::binary_search(seen.begin(), seen.end(), static_cast<RowNumber>(each.row));
  });
  insertion.expired = std::move(expired);
  for (const Evictor::Victim& each : insertion.expired) capacity->remove(each.key);
}

std::int64_t Index::Impl::expire(bool is_dry) {
  if (!evictor || !evictor->meta().expires()) {
    throw std::invalid_argument(
        title + ": expire needs keys that expire; set a ttl or a share of eviction");
  }
  require_no_steps("expire");
  const std::vector<Evictor::Victim> expired = find_expired(step_of(nullptr));
  if (is_dry) return static_cast<std::int64_t>(expired.size());
  return evict_chosen(expired);
}

std::int64_t Index::expire() {
  const std::unique_lock lock(impl_->mutex);
  return impl_->expire();
}

void Index::set_time(std::int64_t time) {
  if (!impl_->evictor || !impl_->evictor->meta().is_by_time()) {
    throw std::invalid_argument(impl_->title +
                                ": a time is set, and only eviction by time takes it");
  }
  const std::unique_lock lock(impl_->mutex);
  impl_->time = time;
}

}  // namespace recsdk
