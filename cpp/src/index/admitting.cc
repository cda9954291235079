// How a rule of admission decides on the new keys of a call.
#include <algorithm>
#include <memory>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "index/index_impl.h"

namespace recsdk {

using internal::AdmittingCall;
using internal::Insertion;
using internal::LeaseRecord;
using internal::RowState;

namespace {

// What comes with some of the keys; none where one number is for all.
template <typename Value>
std::vector<Value> part_of(std::span<const Value> values, std::span<const std::size_t> places) {
  std::vector<Value> part;
  if (values.size() <= 1) return part;
  part.reserve(places.size());
  for (const std::size_t place : places) part.push_back(values[place]);
  return part;
}

}  // namespace

// The keys that the rule keeps out are left aside; the others are inserted as a call of their own.
void Index::Impl::insert_admitted(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                  RowState state, Insertion& insertion) {
  find(keys, rows_out, outcomes);
  const bool keeps_out =
      admission->decide(keys, outcomes, {insertion.data.counts, insertion.data.clicks},
                        insertion.step, insertion.admission);
  if (insertion.admission.seen.empty()) return;
  if (!keeps_out) return insert_into_room(keys, rows_out, outcomes, state, insertion);
  std::vector<std::size_t> places;
  std::vector<Key> part;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kNotAdmitted) continue;
    places.push_back(i);
    part.push_back(keys[i]);
  }
  std::vector<RowNumber> rows(part.size());
  std::vector<Outcome> kinds(part.size());
  const KeyData whole = insertion.data;
  const std::vector<std::int64_t> times = part_of(whole.times, places);
  const std::vector<float> scores = part_of(whole.scores, places);
  const std::vector<std::int64_t> counts = part_of(whole.counts, places);
  const std::vector<std::int64_t> clicks = part_of(whole.clicks, places);
  if (whole.times.size() > 1) insertion.data.times = times;
  if (whole.scores.size() > 1) insertion.data.scores = scores;
  if (whole.counts.size() > 1) insertion.data.counts = counts;
  if (whole.clicks.size() > 1) insertion.data.clicks = clicks;
  insert_into_room(part, rows.data(), kinds.data(), state, insertion);
  insertion.data = whole;
  for (std::size_t j = 0; j < places.size(); ++j) {
    rows_out[places[j]] = rows[j];
    outcomes[places[j]] = kinds[j];
  }
}

void Index::Impl::prepare_admission(const Outcome* outcomes, Insertion& insertion,
                                    LeaseRecord* record) {
  admission->prepare(outcomes, insertion.admission, record != nullptr);
  if (record == nullptr) return;
  const auto make_room = [](auto& list, std::size_t count) {
    const std::size_t needed = list.size() + count;
    if (list.capacity() < needed) list.reserve(std::max(needed, 2 * list.capacity()));
  };
  make_room(record->records_before, internal::Admission::num_changes(insertion.admission));
  make_room(record->admitting, 1);
}

void Index::Impl::settle_admission(const Outcome* outcomes, Insertion& insertion,
                                   LeaseRecord* record) noexcept {
  if (insertion.admits_all) {
    for (const std::uint32_t row : insertion.rows) admission->forget(numbers.key(row));
    return;
  }
  if (record != nullptr)
    record->admitting.push_back({num_admitting_calls++, record->records_before.size()});
  admission->settle(insertion.admission, outcomes,
                    record == nullptr ? nullptr : &record->records_before);
}

// Of each key what it was before the first call of a batch in flight that changed it.
std::vector<AdmitRecord> Index::Impl::visible_records() const {
  std::vector<std::pair<std::uint64_t, std::span<const AdmitRecord>>> calls;
  for (const auto& record : open_steps) {
    std::size_t end = record->records_before.size();
    for (std::size_t i = record->admitting.size(); i-- > 0;) {
      const AdmittingCall& call = record->admitting[i];
      const std::span<const AdmitRecord> all(record->records_before);
      calls.emplace_back(call.number, all.subspan(call.first_record, end - call.first_record));
      end = call.first_record;
    }
  }
  std::sort(calls.begin(), calls.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<AdmitRecord> before;
  for (const auto& [number, records] : calls)
    before.insert(before.end(), records.begin(), records.end());
  return admission->records(before);
}

std::unique_ptr<internal::Admission> Index::Impl::empty_admission() const {
  if (!admission) return nullptr;
  const std::shared_lock lock(mutex);
  return admission->empty_copy();
}

std::unique_ptr<internal::Admission> Index::Impl::counted_anew(
    const internal::KeyMap& rows, std::span<const AdmitRecord> records) const {
  if (!admission) {
    if (records.empty()) return nullptr;
    throw std::invalid_argument(title +
                                ": counts of keys without a row need a rule of admission; set it, "
                                "or leave them out");
  }
  admission->check(records, title);
  std::unique_ptr<internal::Admission> made = empty_admission();
  if (admission->has_sketch()) {  // its keys stand for words, and may have rows
    made->assign(records);
    return made;
  }
  std::vector<Key> keys(records.size());
  std::transform(records.begin(), records.end(), keys.begin(),
                 [](const AdmitRecord& record) { return record.key; });
  std::vector<RowNumber> found(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  rows.find(keys, found.data(), outcomes.data());
  const auto twice = std::find(outcomes.begin(), outcomes.end(), Outcome::kFound);
  if (twice != outcomes.end()) {
    const Key key = keys[static_cast<std::size_t>(twice - outcomes.begin())];
    throw std::invalid_argument(title + ": key " + std::to_string(key) +
                                " has a row and a count of keys without one; pass one of them");
  }
  made->assign(records);
  return made;
}

}  // namespace recsdk
