// The rule: what it asks to be counted, and which keys of a call it admits.
#include "admission/admission.h"

#include <algorithm>
#include <bit>

#include "kernels/scalar_math.h"
#include "recsdk/initializer.h"
#include "util/hash.h"

namespace recsdk {

std::uint64_t admission_salt(std::uint64_t seed, std::string_view name) {
  return internal::mix64(seed ^ internal::mix64(table_hash(name)));
}

}  // namespace recsdk

namespace recsdk::internal {

using Kind = AdmitTerm::Kind;
using Seen = AdmissionCall::Seen;

namespace {

std::int64_t at_or_one(std::span<const std::int64_t> values, std::size_t i) {
  return values.size() == 1 ? values[0] : values[i];
}

// Uniform in [0, 1), the same for every call of a step.
double draw(std::uint64_t salt, std::size_t term, Key key, std::int64_t step) {
  std::uint64_t bits = mix64(salt + (term + 1) * kIncrement);
  bits = mix64(bits ^ static_cast<std::uint64_t>(key));
  bits = mix64(bits ^ static_cast<std::uint64_t>(step));
  return static_cast<double>(bits >> 11U) * 0x1p-53;
}

bool is_worth(const AdmitTerm& term, std::int64_t shows, std::int64_t clicks) {
  return term.alpha * static_cast<double>(shows) + term.beta * static_cast<double>(clicks) >=
         term.threshold;
}

}  // namespace

Admission::Admission(const AdmitConfig& config, std::optional<std::int64_t> groups,
                     std::optional<GroupRange> owned, std::uint64_t hash_seed)
    : config_(config), hash_seed_(hash_seed), map_(hash_seed) {
  std::int64_t most_sketched = 0;
  for (const AdmitTerm& term : config_.rule) {
    if (term.kind == Kind::kCount) most_ = std::max(most_, term.count);
    if (term.kind == Kind::kShowClick) most_ = kMostAdmitCount;
    const bool is_of_step = term.kind == Kind::kShowClickOfStep;
    keeps_clicks_ |= term.kind == Kind::kShowClick;
    takes_clicks_ |= is_of_step || term.kind == Kind::kShowClick;
    needs_clicks_ |= (is_of_step || term.kind == Kind::kShowClick) && term.beta > 0.0;
    if (term.kind == Kind::kCountSketch) most_sketched = std::max(most_sketched, term.count);
    looks_at_step_ |=
        is_of_step || term.kind == Kind::kProbability || term.kind == Kind::kCountSketch;
  }
  if (config_.max_bytes) sketch_.emplace(*config_.max_bytes, most_sketched);
  is_limited_ = config_.max_records.has_value();
  if (!is_limited_) return;
  constexpr std::int64_t kMost = kNone - 1;
  const std::int64_t max_records = *config_.max_records;
  const std::int64_t num_groups = groups.value_or(default_eviction_groups(max_records));
  const GroupRange range = owned.value_or(GroupRange{0, num_groups});
  shift_ = 16 - std::countr_zero(static_cast<std::uint64_t>(num_groups));
  groups_.resize(static_cast<std::size_t>(num_groups));
  for (std::int64_t group = range.begin; group < range.end; ++group) {
    groups_[static_cast<std::size_t>(group)].quota = static_cast<std::uint32_t>(
        std::min(eviction_group_quota(max_records, num_groups, group), kMost));
  }
}

Admission::Admission(const Admission& other, EmptyCopy /*tag*/)
    : config_(other.config_),
      most_(other.most_),
      looks_at_step_(other.looks_at_step_),
      takes_clicks_(other.takes_clicks_),
      keeps_clicks_(other.keeps_clicks_),
      needs_clicks_(other.needs_clicks_),
      is_limited_(other.is_limited_),
      shift_(other.shift_),
      hash_seed_(other.hash_seed_),
      map_(other.hash_seed_),
      groups_(other.groups_.size()),
      sketch_(other.sketch_ ? std::optional<CountSketch>(other.sketch_->empty_copy())
                            : std::nullopt) {
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].quota = other.groups_[g].quota;
}

// The distinct keys without a row, with how often they occur.
void Admission::gather(std::span<const Key> keys, const Outcome* outcomes, const Brought& brought,
                       AdmissionCall& call) const {
  std::vector<std::pair<Key, std::size_t>> found;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kMissing) found.emplace_back(keys[i], i);
  }
  std::sort(found.begin(), found.end());
  call.seen.clear();
  for (const auto& [key, place] : found) {
    const std::int64_t count = brought.counts.empty() ? 1 : at_or_one(brought.counts, place);
    const std::int64_t clicks = brought.clicks.empty() ? 0 : at_or_one(brought.clicks, place);
    if (call.seen.empty() || call.seen.back().key != key) {
      call.seen.push_back({.key = key, .place = place, .count = count, .clicks = clicks});
    } else {
      call.seen.back().count = add(call.seen.back().count, count);
      call.seen.back().clicks = add(call.seen.back().clicks, clicks);
    }
  }
}

void Admission::find_records(AdmissionCall& call) const {
  if (map_.size() == 0) return;
  std::vector<Key> keys(call.seen.size());
  std::transform(call.seen.begin(), call.seen.end(), keys.begin(),
                 [](const Seen& seen) { return seen.key; });
  std::vector<RowNumber> numbers(keys.size());
  std::vector<Outcome> outcomes(keys.size());
  map_.find(keys, numbers.data(), outcomes.data());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kFound)
      call.seen[i].record = static_cast<std::uint32_t>(numbers[i]);
  }
}

// The rule in postfix order: what holds is a stack of bits.
bool Admission::admits(const Seen& seen, std::int64_t step) const {
  std::uint64_t held = 0;
  for (std::size_t i = 0; i < config_.rule.size(); ++i) {
    const AdmitTerm& term = config_.rule[i];
    const std::uint64_t last = held & 1U;
    if (term.kind == Kind::kAll || term.kind == Kind::kAny) {
      held >>= 1U;
      held = term.kind == Kind::kAll ? held & (~std::uint64_t{1} | last) : held | last;
      continue;
    }
    held = held << 1U | static_cast<std::uint64_t>(holds(i, seen, step));
  }
  return (held & 1U) != 0;
}

// Whether a term that joins no others holds.
bool Admission::holds(std::size_t place, const Seen& seen, std::int64_t step) const {
  const AdmitTerm& term = config_.rule[place];
  if (term.kind == Kind::kCount) return seen.total >= term.count;
  if (term.kind == Kind::kCountSketch) return seen.sketched >= term.count;
  if (term.kind == Kind::kShowClick) return is_worth(term, seen.total, seen.all_clicks);
  if (term.kind == Kind::kShowClickOfStep) return is_worth(term, seen.in_step, seen.step_clicks);
  return draw(config_.salt, place, seen.key, step) >=
         power(1.0 - term.probability, static_cast<std::uint64_t>(seen.in_step));
}

// What the key counted as before the step.
std::int64_t Admission::sketched_before(Key key, std::int64_t step) const {
  const CountSketch::Cells cells = sketch_->cells_of(key);
  const auto end = step_of_counts_ == step ? before_step_.end() : before_step_.begin();
  std::int64_t least = kMostSketchCount;
  for (std::size_t row = 0; row < cells.size(); ++row) {
    const auto found = std::lower_bound(before_step_.begin(), end, std::pair(cells[row], 0UL));
    const bool is_changed = found != end && found->first == cells[row];
    const std::uint64_t word = is_changed ? found->second : sketch_->word(cells[row]);
    least = std::min(least, CountSketch::counter(word, row));
  }
  return least;
}

bool Admission::decide(std::span<const Key> keys, Outcome* outcomes, const Brought& brought,
                       std::int64_t step, AdmissionCall& call) const {
  gather(keys, outcomes, brought, call);
  call.step = step;
  if (most_ > 0) find_records(call);
  auto earlier = in_step_.begin();
  const auto end = step_of_counts_ == step ? in_step_.end() : in_step_.begin();
  bool keeps_out = false;
  for (Seen& seen : call.seen) {
    while (earlier != end && earlier->key < seen.key) ++earlier;
    const bool came_before = earlier != end && earlier->key == seen.key;
    seen.in_step = came_before ? add(earlier->count, seen.count) : seen.count;
    seen.step_clicks = came_before ? add(earlier->clicks, seen.clicks) : seen.clicks;
    const std::int64_t before = seen.record == kNone ? 0 : at(seen.record).count;
    seen.total = std::min(add(before, seen.count), most_);
    if (keeps_clicks_) {
      const std::int64_t clicks = seen.record == kNone ? 0 : at(seen.record).clicks;
      seen.all_clicks = std::min(add(clicks, seen.clicks), kMostAdmitCount);
    }
    if (sketch_) seen.sketched = add(sketched_before(seen.key, step), seen.in_step);
    seen.is_admitted = admits(seen, step);
    keeps_out |= !seen.is_admitted;
  }
  if (!keeps_out) return false;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    const auto found = std::lower_bound(call.seen.begin(), call.seen.end(), keys[i],
                                        [](const Seen& seen, Key key) { return seen.key < key; });
    if (!found->is_admitted) outcomes[i] = Outcome::kNotAdmitted;
  }
  return true;
}

}  // namespace recsdk::internal
