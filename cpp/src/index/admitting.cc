// How a rule of admission decides on the new keys of a call.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "index/index_impl.h"

namespace recsdk {

using internal::Insertion;
using internal::LeaseRecord;
using internal::RowState;

void Index::Impl::check_counts(std::size_t num_keys, const KeyData& data, bool insert) const {
  if (data.counts.empty()) return;
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": " + what);
  };
  if (!insert || !admission)
    fail("counts are given, and only calls that insert, with admission, take them");
  if (data.counts.size() > 1 && data.counts.size() != num_keys)
    fail("counts has " + std::to_string(data.counts.size()) + " elements for " +
         std::to_string(num_keys) + " keys; pass one per key, or one for all");
  const auto least = std::min_element(data.counts.begin(), data.counts.end());
  if (*least < 1) fail("a count is " + std::to_string(*least) + "; pass 1 or more");
}

void Index::Impl::check_admits_all(const MapOptions& options) const {
  if (!options.admits_all) return;
  if (!options.insert)
    throw std::invalid_argument(title + ": admits_all is of calls that insert; leave it out");
  // What it forgets could not be given back to readers.
  if (options.lease != nullptr && options.lease->step())
    throw std::invalid_argument(title +
                                ": a call of a batch with a step cannot admit all keys; pass a "
                                "lease without a step, or none");
}

// The keys that the rule keeps out are left aside; the others are inserted as a call of their own.
void Index::Impl::insert_admitted(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                  RowState state, Insertion& insertion) {
  find(keys, rows_out, outcomes);
  const bool keeps_out =
      admission->decide(keys, outcomes, insertion.data.counts, insertion.step, insertion.admission);
  if (insertion.admission.seen.empty()) return;
  if (!keeps_out) return insert_into_room(keys, rows_out, outcomes, state, insertion);
  std::vector<std::size_t> places;
  std::vector<Key> part;
  std::vector<std::int64_t> times;
  std::vector<float> scores;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kNotAdmitted) continue;
    places.push_back(i);
    part.push_back(keys[i]);
    if (insertion.data.times.size() > 1) times.push_back(insertion.data.times[i]);
    if (!insertion.data.scores.empty()) scores.push_back(insertion.data.scores[i]);
  }
  std::vector<RowNumber> rows(part.size());
  std::vector<Outcome> kinds(part.size());
  const KeyData whole = insertion.data;
  if (!times.empty()) insertion.data.times = times;
  if (!scores.empty()) insertion.data.scores = scores;
  insert_into_room(part, rows.data(), kinds.data(), state, insertion);
  insertion.data = whole;
  for (std::size_t j = 0; j < places.size(); ++j) {
    rows_out[places[j]] = rows[j];
    outcomes[places[j]] = kinds[j];
  }
}

void Index::Impl::prepare_admission(Insertion& insertion, LeaseRecord* record) {
  admission->prepare(insertion.admission, record != nullptr);
  if (record == nullptr) return;
  std::vector<AdmitRecord>& before = record->records_before;
  const std::size_t needed = before.size() + internal::Admission::num_changes(insertion.admission);
  if (before.capacity() < needed) before.reserve(std::max(needed, 2 * before.capacity()));
}

void Index::Impl::settle_admission(const Outcome* outcomes, Insertion& insertion,
                                   LeaseRecord* record) noexcept {
  if (insertion.admits_all) {
    for (const std::uint32_t row : insertion.rows) admission->forget(numbers.key(row));
    return;
  }
  admission->settle(insertion.admission, outcomes,
                    record == nullptr ? nullptr : &record->records_before);
}

std::vector<AdmitRecord> Index::Impl::visible_records() const {
  std::vector<AdmitRecord> before;
  for (const auto& record : open_steps)
    before.insert(before.end(), record->records_before.begin(), record->records_before.end());
  return admission->records(before);
}

std::unique_ptr<internal::Admission> Index::Impl::counted_anew(
    const internal::KeyMap& rows, std::span<const AdmitRecord> records) const {
  if (!admission) {
    if (records.empty()) return nullptr;
    throw std::invalid_argument(title +
                                ": counts of keys without a row need a rule of admission; set it, "
                                "or leave them out");
  }
  std::vector<AdmitRecord> checked;
  internal::append_records(checked, records, title);
  std::vector<Key> keys(checked.size());
  std::transform(checked.begin(), checked.end(), keys.begin(),
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
  std::unique_ptr<internal::Admission> made = admission->empty_copy();
  made->assign(checked);
  return made;
}

}  // namespace recsdk
