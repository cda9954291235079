// Looks at all keys, at the steps that begin with one: rows are measured anew, and keys expire.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "util/prefetch.h"

#include "index/index_impl.h"

namespace recsdk {

using internal::Capacity;
using internal::Evictor;
using internal::Insertion;
using internal::kItemsAhead;
using internal::RowMeta;
using internal::RowState;

namespace {

constexpr std::size_t kFewShifted = 4;  // more than such a part of all rows are not filed singly
constexpr std::size_t kRowsAtOnce = 32'768;

// A key that may leave, and where it stands among those of its group.
struct Standing {
  std::uint32_t group = 0;
  std::uint64_t order = 0;
  std::uint64_t tie = 0;
  std::uint32_t row = 0;

  friend bool operator<(const Standing& a, const Standing& b) {
    return std::tie(a.group, a.order, a.tie) < std::tie(b.group, b.order, b.tie);
  }
};

// Keys in ascending order.
std::uint64_t ascending(Key key) {
  return static_cast<std::uint64_t>(key) ^ (std::uint64_t{1} << 63U);
}

std::size_t part_of(std::int64_t count, double share) {
  if (count == 0) return 0;
  return static_cast<std::size_t>(
      std::max(static_cast<std::int64_t>(static_cast<double>(count) * share), std::int64_t{1}));
}

}  // namespace

// Keeps found(i) of each row.
template <typename Found>
void Index::Impl::keep_found(std::span<const std::uint32_t> rows, const Found& found,
                             Insertion& insertion) {
  const RowMeta& meta = evictor->meta();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kItemsAhead < rows.size()) numbers.prefetch_meta(rows[i + kItemsAhead]);
    std::int64_t* const words = numbers.meta(rows[i]);
    const float now = found(i);
    const float before = meta.measured(words);
    if (meta.set_measured(words, now)) insertion.measured.push_back({rows[i], before});
  }
}

void Index::Impl::measure_norms(std::span<const std::uint32_t> rows, Insertion& insertion) {
  std::vector<float> norms(rows.size());
  {
    const internal::FairMutex::CallbackScope scope(mutex);
    maker->norms(rows, norms);
  }
  keep_found(rows, [&](std::size_t i) { return norms[i]; }, insertion);
}

// Adds what the function makes of columns.
void Index::Impl::ask_function(const internal::Columns& columns, std::vector<float>& places) {
  std::vector<double> found(columns.size(), 0.0);
  {
    const internal::FairMutex::CallbackScope scope(mutex);
    config.eviction->function(
        {clock.step, columns.steps, columns.times, columns.counts, columns.scores}, found);
  }
  for (const double place : found) {
    places.push_back(static_cast<float>(place));
    if (!std::isfinite(places.back()))
      throw std::invalid_argument(title +
                                  ": the function of eviction gave a number that is not finite "
                                  "in single precision; have it give others");
  }
}

// Of rows that are alike the function is asked once.
void Index::Impl::place_rows(std::span<const std::uint32_t> rows, Insertion& insertion) {
  internal::AlikeRows alike(evictor->meta());
  std::vector<float> places;
  while (!rows.empty()) {
    const auto piece = rows.first(std::min(kRowsAtOnce, rows.size()));
    alike.take(piece, numbers);
    places.clear();
    ask_function(alike.columns(), places);
    keep_found(piece, [&](std::size_t i) { return places[alike.of_rows()[i]]; }, insertion);
    rows = rows.subspan(piece.size());
  }
}

// By a function of `now` all rows stand elsewhere at each look: nothing is written of them, and
// only those are filed that are low, going by some of them.
void Index::Impl::place_kinds(Insertion& insertion) {
  internal::RowKinds& kinds = *evictor->kinds();
  insertion.looked_at = unmeasured->take(numbers);
  internal::RowKinds::Before& before = insertion.kinds_before.emplace();
  kinds.learn(insertion.looked_at, numbers, before);
  kinds.find_used(numbers);
  std::vector<float> places;
  places.reserve(kinds.num_used());
  while (places.size() < kinds.num_used())
    ask_function(kinds.columns(places.size(), kRowsAtOnce), places);
  kinds.set_places(places, before);
  const internal::UsedSample sample = internal::sample_used(key_map.size(), numbers);
  std::vector<float> found;
  found.reserve(sample.rows.size());
  for (const std::uint32_t row : sample.rows) found.push_back(kinds.place(row, numbers.meta(row)));
  const float border = evictor->likely_border(found, sample.stride);
  if (tracker != nullptr || !open_steps.empty()) kinds.find_shifted(numbers, before);
  kinds.mark_low(border, numbers, evictor->low_rows(numbers));
  evictor->refile_all(border, numbers, *capacity);
}

// Those that are low of all rows that have keys, and what they are below.
float Index::Impl::mark_low() {
  const RowMeta& meta = evictor->meta();
  const internal::UsedSample sample = internal::sample_used(key_map.size(), numbers);
  std::vector<float> found;
  found.reserve(sample.rows.size());
  for (const std::uint32_t row : sample.rows) found.push_back(meta.measured(numbers.meta(row)));
  const float border = evictor->likely_border(found, sample.stride);
  const internal::RowBits& low_rows = evictor->low_rows(numbers);
  for (std::int64_t i = 0; i * internal::kWordRows < numbers.end(); ++i) {
    for (std::uint64_t bits = numbers.used_word(i); bits != 0; bits &= bits - 1) {
      const RowNumber row = i * internal::kWordRows + std::countr_zero(bits);
      if (meta.measured(numbers.meta(row)) < border) low_rows.assign_alone(row, true);
    }
  }
  return border;
}

// At a look rows are measured, and those filed anew that stand elsewhere than before: all rows, or
// those that may have changed since the look before, as the others would come to the same.
void Index::Impl::measure(Insertion& insertion) {
  const RowMeta& meta = evictor->meta();
  if (!meta.is_measured() || !is_look_due(insertion.step)) return;
  if (evictor->kinds() != nullptr) return place_kinds(insertion);
  std::vector<std::uint32_t>& rows = insertion.looked_at;
  rows = unmeasured ? unmeasured->take(numbers) : internal::used_rows(numbers);
  insertion.measured.reserve(rows.size());
  if (meta.is_by_norm()) {
    measure_norms(rows, insertion);
  } else {
    place_rows(rows, insertion);
  }
  if (insertion.measured.size() <= static_cast<std::size_t>(key_map.size()) / kFewShifted) {
    evictor->refile(insertion.measured, numbers, *capacity);
  } else {
    evictor->refile_all(mark_low(), numbers, *capacity);
  }
}

void Index::Impl::take_back_measured(Insertion& insertion) noexcept {
  for (const internal::Measured& each : insertion.measured)
    evictor->meta().set_measured(numbers.meta(each.row), each.before);
  if (unmeasured) unmeasured->put_back(insertion.looked_at);
  if (insertion.kinds_before) evictor->kinds()->take_back(*insertion.kinds_before);
  if (!insertion.measured.empty() || insertion.kinds_before) evictor->unsort();
}

std::vector<Evictor::Victim> Index::Impl::find_expired(std::int64_t step,
                                                       std::optional<std::int64_t> told) const {
  const RowMeta& meta = evictor->meta();
  const std::int64_t now = told.value_or(clock.time.value_or(kNoTime));
  std::vector<Evictor::Victim> expired;
  for (RowNumber row = 0; row < numbers.end(); ++row) {
    if (numbers.state(row) == RowState::kFree || numbers.is_leaving(row)) continue;
    const std::int64_t* const words = numbers.meta(row);
    if (meta.has_expired(words, clock.step, now) && meta.may_leave(words, step))
      expired.push_back({numbers.key(row), static_cast<std::uint32_t>(row), LeaveCause::kExpired});
  }
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
    const Key key = numbers.key(row);
    const std::uint64_t hash = Capacity::hash_of(key);
    const auto group = static_cast<std::uint32_t>(capacity->group_of_hash(hash));
    ++counts[group];
    if (may_leave)
      standings.push_back({group, evictor->order(static_cast<std::uint32_t>(row), numbers),
                           meta.is_by_totals() ? ascending(key) : hash,
                           static_cast<std::uint32_t>(row)});
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
  std::vector<Evictor::Victim> expired = find_expired(insertion.step, insertion.data.now);
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
  const std::vector<Evictor::Victim> expired = find_expired(step_of(std::nullopt), std::nullopt);
  if (is_dry) return static_cast<std::int64_t>(expired.size());
  return evict_chosen(expired);
}

std::int64_t Index::expire() {
  const std::unique_lock lock(impl_->mutex);
  return impl_->expire();
}

}  // namespace recsdk
