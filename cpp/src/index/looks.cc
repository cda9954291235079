// Looks at all keys, at the steps that begin with one: rows are measured anew, and keys expire.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

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
constexpr std::size_t kFewShifted = 4;  // more than such a part of all rows are not filed singly

// A key that may leave, and where it stands among those of its group.
struct Standing {
  std::uint32_t group = 0;
  std::uint64_t order = 0;
  std::uint64_t hash = 0;
  std::uint32_t row = 0;

  friend bool operator<(const Standing& a, const Standing& b) {
    return std::tie(a.group, a.order, a.hash) < std::tie(b.group, b.order, b.hash);
  }
};

std::size_t part_of(std::int64_t count, double share) {
  if (count == 0) return 0;
  return static_cast<std::size_t>(
      std::max(static_cast<std::int64_t>(static_cast<double>(count) * share), std::int64_t{1}));
}

}  // namespace

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
  RowMeta::Columns columns;
  for (std::size_t begin = 0; begin < rows.size(); begin += kKeysAtOnce) {
    evictor->meta().fill_columns(rows.subspan(begin, std::min(kKeysAtOnce, rows.size() - begin)),
                                 numbers, columns);
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

// At a look rows are measured, and those filed anew that stand elsewhere than before: all rows, or
// those that may have changed since the look before, as the others would come to the same.
void Index::Impl::measure(Insertion& insertion) {
  const RowMeta& meta = evictor->meta();
  if (!meta.is_measured() || !is_look_due(insertion.step)) return;
  std::vector<std::uint32_t>& rows = insertion.looked_at;
  rows = unmeasured ? unmeasured->take(numbers) : internal::used_rows(numbers);
  const std::vector<float> found = measured(rows);
  insertion.measured.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) numbers.prefetch_meta(rows[i + kAhead]);
    std::int64_t* const words = numbers.meta(rows[i]);
    const float before = meta.measured(words);
    if (meta.set_measured(words, found[i])) insertion.measured.push_back({rows[i], before});
  }
  if (insertion.measured.size() > static_cast<std::size_t>(key_map.size()) / kFewShifted) {
    evictor->refile_all(unmeasured ? internal::used_rows(numbers) : rows, numbers, *capacity);
  } else {
    evictor->refile(insertion.measured, numbers, *capacity);
  }
}

void Index::Impl::take_back_measured(const Insertion& insertion) noexcept {
  for (const internal::Measured& each : insertion.measured)
    evictor->meta().set_measured(numbers.meta(each.row), each.before);
  if (unmeasured) unmeasured->put_back(insertion.looked_at);
  if (!insertion.measured.empty()) evictor->unsort();
}

// The rows that came, or a call has touched: what the next look finds of them follows from that.
void Index::Impl::note_unmeasured(std::size_t num_keys, const RowNumber* rows_in,
                                  const Outcome* outcomes, const Insertion& insertion) noexcept {
  if (!unmeasured) return;
  for (const std::uint32_t row : insertion.rows) unmeasured->note(row);
  if (evictor->meta().is_by_norm()) return;
  for (std::size_t i = 0; i < num_keys; ++i) {
    if (has_row(outcomes[i])) unmeasured->note(rows_in[i]);
  }
}

// What was measured is seen by readers, and is in the next cut of changes, as what a call touches.
void Index::Impl::note_measured(const Insertion& insertion, LeaseRecord* record) noexcept {
  const RowMeta& meta = evictor->meta();
  if (record == nullptr) {
    if (tracker == nullptr) return;
    for (const internal::Measured& each : insertion.measured) tracker->note_changed(each.row);
    return;
  }
  const auto num_words = static_cast<std::size_t>(meta.num_words());
  for (const internal::Measured& each : insertion.measured) {  // there is room
    record->touched.push_back(each.row);
    record->touched.resize(record->touched.size() + num_words);
    meta.copy_before(numbers.meta(each.row), each.before,
                     &record->touched[record->touched.size() - num_words]);
  }
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

// Adds the keys that leave beside those that have expired, which count no more.
void Index::Impl::add_share(double share, std::int64_t step, std::int64_t now,
                            std::vector<Evictor::Victim>& expired) const {
  const RowMeta& meta = evictor->meta();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(capacity->num_groups()), 0);
  std::vector<Standing> standings;
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) == RowState::kFree || numbers.is_leaving(row)) continue;
    const std::int64_t* const words = numbers.meta(row);
    const bool may_leave = meta.may_leave(words, step);
    if (may_leave && meta.has_expired(words, clock.step, now)) continue;
    const std::uint64_t hash = Capacity::hash_of(numbers.key(row));
    const auto group = static_cast<std::uint32_t>(capacity->group_of_hash(hash));
    ++counts[group];
    if (may_leave)
      standings.push_back({group, meta.order(words), hash, static_cast<std::uint32_t>(row)});
  }
  std::sort(standings.begin(), standings.end());
  for (auto begin = standings.begin(); begin != standings.end();) {
    const std::uint32_t group = begin->group;
    const auto end = std::find_if(begin, standings.end(),
                                  [group](const Standing& each) { return each.group != group; });
    const auto most = static_cast<std::size_t>(end - begin);
    const auto last =
        begin + static_cast<std::ptrdiff_t>(std::min(part_of(counts[group], share), most));
    for (auto each = begin; each != last; ++each)
      expired.push_back({numbers.key(each->row), each->row, LeaveCause::kExpired});
    begin = end;
  }
  // They leave in the order of their rows, as all that expire.
  std::sort(expired.begin(), expired.end(),
            [](const auto& a, const auto& b) { return a.row < b.row; });
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

}  // namespace recsdk
