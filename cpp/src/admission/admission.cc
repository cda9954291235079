#include "admission/admission.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "kernels/scalar_math.h"
#include "recsdk/error.h"
#include "recsdk/initializer.h"
#include "util/hash.h"
#include "util/number_text.h"

namespace recsdk {

std::uint64_t admission_salt(std::uint64_t seed, std::string_view name) {
  return internal::mix64(seed ^ internal::mix64(table_hash(name)));
}

}  // namespace recsdk

namespace recsdk::internal {

using Kind = AdmitTerm::Kind;
using Seen = AdmissionCall::Seen;

namespace {

constexpr std::uint32_t kNone = AdmissionCall::kNone;
constexpr std::uint32_t kMaxClicks = 0x7FFFFFFF;  // of the 31 bits of a record
constexpr std::uint64_t kIncrement = 0x9E3779B97F4A7C15U;

std::uint64_t hash_of(Key key) { return virtual_shard_hash(static_cast<std::uint64_t>(key)); }

std::int64_t add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::int64_t>::max() : sum;
}

std::int64_t at_or_one(std::span<const std::int64_t> values, std::size_t i) {
  return values.size() == 1 ? values[0] : values[i];
}

std::uint32_t kept_clicks(std::int64_t clicks) {
  return static_cast<std::uint32_t>(std::min(clicks, kMostAdmitCount));
}

// Uniform in [0, 1), the same for every call of a step.
double draw(std::uint64_t salt, std::size_t term, Key key, std::int64_t step) {
  std::uint64_t bits = mix64(salt + (term + 1) * kIncrement);
  bits = mix64(bits ^ static_cast<std::uint64_t>(key));
  bits = mix64(bits ^ static_cast<std::uint64_t>(step));
  return static_cast<double>(bits >> 11U) * 0x1p-53;
}

}  // namespace

Admission::Admission(const AdmitConfig& config, std::optional<std::int64_t> groups,
                     std::optional<GroupRange> owned, std::uint64_t hash_seed)
    : config_(config), hash_seed_(hash_seed), map_(hash_seed) {
  std::int64_t most_sketched = 0;
  for (const AdmitTerm& term : config_.rule) {
    if (term.kind == Kind::kCount) most_ = std::max(most_, term.count);
    if (term.kind == Kind::kShowClick) most_ = kMostAdmitCount;
    takes_clicks_ |= term.kind == Kind::kShowClick;
    needs_clicks_ |= term.kind == Kind::kShowClick && term.beta > 0.0;
    has_draws_ |= term.kind == Kind::kProbability;
    if (term.kind == Kind::kCountSketch) most_sketched = std::max(most_sketched, term.count);
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
      has_draws_(other.has_draws_),
      takes_clicks_(other.takes_clicks_),
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

// ---- deciding ----------------------------------------------------------------------------------

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
bool Admission::admits(const Seen& seen, std::int64_t in_step, std::int64_t step) const {
  std::uint64_t held = 0;
  for (std::size_t i = 0; i < config_.rule.size(); ++i) {
    const AdmitTerm& term = config_.rule[i];
    const std::uint64_t last = held & 1U;
    if (term.kind == Kind::kAll || term.kind == Kind::kAny) {
      held >>= 1U;
      held = term.kind == Kind::kAll ? held & (~std::uint64_t{1} | last) : held | last;
      continue;
    }
    held = held << 1U | static_cast<std::uint64_t>(holds(i, seen, in_step, step));
  }
  return (held & 1U) != 0;
}

// Whether a term that joins no others holds.
bool Admission::holds(std::size_t place, const Seen& seen, std::int64_t in_step,
                      std::int64_t step) const {
  const AdmitTerm& term = config_.rule[place];
  if (term.kind == Kind::kCount) return seen.total >= term.count;
  if (term.kind == Kind::kCountSketch) return seen.sketched >= term.count;
  if (term.kind == Kind::kShowClick) {
    return term.alpha * static_cast<double>(seen.total) +
               term.beta * static_cast<double>(seen.all_clicks) >=
           term.threshold;
  }
  return draw(config_.salt, place, seen.key, step) >=
         power(1.0 - term.probability, static_cast<std::uint64_t>(in_step));
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
    while (earlier != end && earlier->first < seen.key) ++earlier;
    const bool came_before = earlier != end && earlier->first == seen.key;
    const std::int64_t in_step = came_before ? add(earlier->second, seen.count) : seen.count;
    const std::int64_t before = seen.record == kNone ? 0 : at(seen.record).count;
    seen.total = std::min(add(before, seen.count), most_);
    if (takes_clicks_) {
      const std::int64_t clicks = seen.record == kNone ? 0 : at(seen.record).clicks;
      seen.all_clicks = std::min(add(clicks, seen.clicks), kMostAdmitCount);
    }
    if (sketch_) seen.sketched = add(sketched_before(seen.key, step), in_step);
    seen.is_admitted = admits(seen, in_step, step);
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

// ---- what a call changes -----------------------------------------------------------------------

// Which of the call's keys get a new record: all, or where the group has too little room the
// highest by the fixed hash.
std::vector<std::uint32_t> Admission::choose_added(AdmissionCall& call) {
  std::vector<Candidate> fresh;
  for (std::size_t i = 0; i < call.seen.size(); ++i) {
    const Seen& seen = call.seen[i];
    if (seen.is_admitted || seen.record != kNone) continue;
    const std::uint64_t hash = is_limited_ ? hash_of(seen.key) : 0;
    const std::uint32_t group = is_limited_ ? group_of_hash(hash) : 0;
    fresh.push_back({group, hash, static_cast<std::uint32_t>(i)});
  }
  std::vector<std::uint32_t> chosen;
  chosen.reserve(fresh.size());
  if (is_limited_) std::sort(fresh.begin(), fresh.end());
  for (std::size_t begin = 0; begin < fresh.size();) {
    std::size_t end = fresh.size();
    std::size_t num_dropped = 0;
    if (is_limited_) {
      Group& group = groups_[fresh[begin].group];
      end = begin;
      while (end < fresh.size() && fresh[end].group == fresh[begin].group) ++end;
      const std::size_t room = group.quota - std::min(group.used, group.quota);
      const std::size_t excess = end - begin - std::min(end - begin, room);
      num_dropped = excess - choose_victims(group, static_cast<std::uint32_t>(excess), call);
    }
    for (std::size_t i = begin + num_dropped; i < end; ++i) chosen.push_back(fresh[i].seen);
    begin = end;
  }
  return chosen;
}

// The lowest by (step, hash) leave, but for those of the step. Returns how many.
std::uint32_t Admission::choose_victims(Group& group, std::uint32_t count, AdmissionCall& call) {
  std::uint32_t num_chosen = 0;
  std::uint32_t number = group.first;
  while (num_chosen < count && number != kNone && at(number).step != call.step) {
    if (!group.sorted_step || at(number).step > *group.sorted_step)
      number = sort_run(group, number);
    if (!at(number).is_seen) {
      call.victims.push_back(number);
      ++num_chosen;
    }
    number = at(number).next;
  }
  return num_chosen;
}

// Sorts the records of one step, which begin here, by hash; returns the first of them.
std::uint32_t Admission::sort_run(Group& group, std::uint32_t first) {
  const std::int64_t step = at(first).step;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> run;
  std::uint32_t after = first;
  for (; after != kNone && at(after).step == step; after = at(after).next)
    run.emplace_back(hash_of(at(after).key), after);
  std::sort(run.begin(), run.end());
  std::uint32_t previous = at(first).previous;
  const auto join = [&](std::uint32_t next) {
    (previous == kNone ? group.first : at(previous).next) = next;
    (next == kNone ? group.last : at(next).previous) = previous;
    previous = next;
  };
  for (const auto& [hash, number] : run) join(number);
  join(after);
  group.sorted_step = step;
  return run.front().second;
}

// What later calls of this step need for their draws, and for the sketch.
void Admission::count_step(AdmissionCall& call) const {
  call.in_step.clear();
  if (!(has_draws_ || sketch_) || !call.shares_step) return;
  call.in_step.reserve(call.seen.size() + in_step_.size());
  auto earlier = in_step_.begin();
  const auto end = step_of_counts_ == call.step ? in_step_.end() : in_step_.begin();
  for (const Seen& seen : call.seen) {
    for (; earlier != end && earlier->first < seen.key; ++earlier) call.in_step.push_back(*earlier);
    const bool came_before = earlier != end && earlier->first == seen.key;
    call.in_step.emplace_back(seen.key,
                              came_before ? add((earlier++)->second, seen.count) : seen.count);
  }
  call.in_step.insert(call.in_step.end(), earlier, end);
}

void Admission::prepare(AdmissionCall& call, bool shares_step) {
  call.is_prepared = true;
  call.shares_step = shares_step;
  count_step(call);
  if (sketch_) prepare_sketch(call);
  if (most_ == 0) return;
  for (const Seen& seen : call.seen) {
    if (seen.record != kNone) at(seen.record).is_seen = true;
  }
  const std::vector<std::uint32_t> chosen = choose_added(call);
  call.added.reserve(chosen.size());
  prepare_take(chosen.size());
  for (const std::uint32_t i : chosen) {
    map_.find_or_insert(call.seen[i].key, num_free_ > 0 ? first_free_ : end_);
    call.seen[i].record = take();
    at(call.seen[i].record) = {.key = call.seen[i].key, .is_seen = true};
    call.added.push_back(i);
  }
}

void Admission::undo(const AdmissionCall& call) noexcept {
  if (!call.is_prepared || most_ == 0) return;
  for (std::size_t j = call.added.size(); j-- > 0;) {
    const Seen& seen = call.seen[call.added[j]];
    map_.erase(seen.key);
    at(seen.record).is_seen = false;
    give_back(seen.record);
  }
  for (const Seen& seen : call.seen) {
    if (seen.record != kNone) at(seen.record).is_seen = false;
  }
}

void Admission::settle(AdmissionCall& call, const Outcome* outcomes,
                       std::vector<AdmitRecord>* before) noexcept {
  for (const Seen& seen : call.seen) {
    if (seen.record == kNone) continue;
    Record& record = at(seen.record);
    const bool is_new = record.count == 0;
    if (before != nullptr) before->push_back(of(seen.record));
    if (!is_new) unlink(seen.record);
    record.is_seen = false;
    record.count = static_cast<std::uint32_t>(seen.total);
    record.clicks = kept_clicks(seen.all_clicks) & kMaxClicks;
    record.step = call.step;
    link(seen.record);
    if (has_row(outcomes[seen.place])) drop(seen.record);
  }
  for (const std::uint32_t victim : call.victims) {
    if (before != nullptr) before->push_back(of(victim));
    drop(victim);
  }
  num_lost_ += call.victims.size();
  if (sketch_) settle_sketch(call, outcomes, before);
  in_step_.swap(call.in_step);
  before_step_.swap(call.before_step);
  step_of_counts_ = call.step;
  map_.adapt(static_cast<std::int64_t>(call.added.size()));
}

// ---- the sketch --------------------------------------------------------------------------------

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

void Admission::prepare_sketch(AdmissionCall& call) {
  std::vector<std::uint64_t> cells;
  cells.reserve(CountSketch::kDepth * call.seen.size());
  for (const Seen& seen : call.seen) {
    for (const std::uint64_t cell : sketch_->cells_of(seen.key)) cells.push_back(cell);
  }
  for (const std::uint64_t cell : cells) sketch_->prepare(cell);
  if (!call.shares_step) return;
  std::sort(cells.begin(), cells.end());
  cells.erase(std::unique(cells.begin(), cells.end()), cells.end());
  AdmissionCall::Words own;
  own.reserve(cells.size());
  for (const std::uint64_t cell : cells) own.emplace_back(cell, sketch_->word(cell));
  const auto end = step_of_counts_ == call.step ? before_step_.end() : before_step_.begin();
  call.before_step.reserve(own.size() + static_cast<std::size_t>(end - before_step_.begin()));
  // Of equal cells that of the calls before.
  std::set_union(before_step_.begin(), end, own.begin(), own.end(),
                 std::back_inserter(call.before_step),
                 [](const auto& a, const auto& b) { return a.first < b.first; });
}

void Admission::settle_sketch(AdmissionCall& call, const Outcome* outcomes,
                              std::vector<AdmitRecord>* before) noexcept {
  for (const auto& [cell, word] : call.before_step) {
    if (before != nullptr) before->push_back(CountSketch::record(cell, sketch_->word(cell)));
    sketch_->set(cell, word);
  }
  if (!call.shares_step) {
    for (const Seen& seen : call.seen) {
      if (!has_row(outcomes[seen.place])) sketch_->add(seen.key, seen.count);
    }
    return;
  }
  auto seen = call.seen.begin();
  std::erase_if(call.in_step, [&](const auto& counted) {
    while (seen != call.seen.end() && seen->key < counted.first) ++seen;
    return seen != call.seen.end() && seen->key == counted.first && has_row(outcomes[seen->place]);
  });
  for (const auto& [key, count] : call.in_step) sketch_->add(key, count);
}

// ---- records -----------------------------------------------------------------------------------

// Makes sure that `count` calls of take cannot fail.
void Admission::prepare_take(std::size_t count) {
  constexpr std::size_t kMost = kNone - 1;
  if (count > num_free_ + (kMost - end_))
    throw Error(ErrorCode::kCapacity,
                "more than 2**32 counts of keys without a row; set max_records");
  while (slabs_.size() * kSlabRecords + num_free_ < end_ + count)
    slabs_.push_back(std::make_unique<Record[]>(kSlabRecords));
}

std::uint32_t Admission::take() noexcept {
  if (num_free_ == 0) return end_++;
  --num_free_;
  return std::exchange(first_free_, at(first_free_).next);
}

void Admission::give_back(std::uint32_t number) noexcept {
  at(number) = {.next = first_free_};
  first_free_ = number;
  ++num_free_;
}

// Adds a record as the one that was seen last.
void Admission::link(std::uint32_t number) noexcept {
  if (!is_limited_) return;
  Group& group = groups_[group_of_hash(hash_of(at(number).key))];
  at(number).previous = group.last;
  at(number).next = kNone;
  (group.last == kNone ? group.first : at(group.last).next) = number;
  group.last = number;
  ++group.used;
}

void Admission::unlink(std::uint32_t number) noexcept {
  if (!is_limited_) return;
  const Record& record = at(number);
  Group& group = groups_[group_of_hash(hash_of(record.key))];
  (record.previous == kNone ? group.first : at(record.previous).next) = record.next;
  (record.next == kNone ? group.last : at(record.next).previous) = record.previous;
  --group.used;
}

void Admission::drop(std::uint32_t number) noexcept {
  map_.erase(at(number).key);
  unlink(number);
  give_back(number);
}

void Admission::forget(Key key) noexcept {
  if (map_.size() == 0) return;
  const std::optional<std::uint32_t> number = map_.find_one(key);
  if (number) drop(*number);
}

void Admission::clear() noexcept {
  map_.clear();
  slabs_.clear();
  end_ = num_free_ = 0;
  first_free_ = kNone;
  for (Group& group : groups_) {
    const std::uint32_t quota = group.quota;
    group = Group();
    group.quota = quota;
  }
  if (sketch_) sketch_->clear();
  in_step_.clear();
  before_step_.clear();
  step_of_counts_.reset();
}

// Of a group that has too many, those seen longest ago are left out.
void Admission::assign(std::span<const AdmitRecord> records) {
  if (sketch_) {
    for (const AdmitRecord& record : records) sketch_->assign(record);
  }
  if (most_ == 0) return;
  std::vector<std::uint64_t> room(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) room[g] = groups_[g].quota;
  std::vector<std::tuple<std::int64_t, std::uint64_t, std::size_t>> order;  // step, hash, place
  order.reserve(records.size());
  for (std::size_t i = 0; i < records.size(); ++i)
    order.emplace_back(records[i].step, hash_of(records[i].key), i);
  std::sort(order.begin(), order.end());
  std::vector<std::uint8_t> is_kept(records.size(), 1);
  for (std::size_t j = order.size(); is_limited_ && j-- > 0;) {
    std::uint64_t& left = room[group_of_hash(std::get<1>(order[j]))];
    if (left == 0) is_kept[std::get<2>(order[j])] = 0;
    left -= static_cast<std::uint64_t>(left != 0);
  }
  prepare_take(records.size());
  map_.reserve(static_cast<std::int64_t>(records.size()));
  for (const auto& [step, hash, place] : order) {
    if (is_kept[place] == 0) {
      ++num_lost_;
      continue;
    }
    map_.find_or_insert(records[place].key, end_);
    const std::uint32_t number = take();
    at(number) = {.key = records[place].key,
                  .step = step,
                  .count = static_cast<std::uint32_t>(std::min(records[place].count, most_)),
                  .clicks = takes_clicks_ ? kept_clicks(records[place].clicks) & kMaxClicks : 0};
    link(number);
  }
  map_.adapt(map_.size());
}

void Admission::replace_by(Admission& other) noexcept {
  map_.swap(other.map_);
  slabs_.swap(other.slabs_);
  std::swap(end_, other.end_);
  std::swap(first_free_, other.first_free_);
  std::swap(num_free_, other.num_free_);
  groups_.swap(other.groups_);
  num_lost_ += other.num_lost_;
  if (sketch_) sketch_->swap(*other.sketch_);
  in_step_.swap(other.in_step_);
  before_step_.swap(other.before_step_);
  std::swap(step_of_counts_, other.step_of_counts_);
}

std::vector<AdmitRecord> Admission::records(std::span<const AdmitRecord> before) const {
  const auto is_lower = [](const AdmitRecord& a, const AdmitRecord& b) { return a.key < b.key; };
  std::vector<AdmitRecord> earlier(before.begin(), before.end());
  std::stable_sort(earlier.begin(), earlier.end(), is_lower);
  earlier.erase(std::unique(earlier.begin(), earlier.end(),
                            [](const auto& a, const auto& b) { return a.key == b.key; }),
                earlier.end());
  std::vector<AdmitRecord> found;
  found.reserve(earlier.size() + static_cast<std::size_t>(map_.size()));
  std::copy_if(earlier.begin(), earlier.end(), std::back_inserter(found),
               [](const AdmitRecord& record) { return record.count > 0; });
  const auto add_now = [&](const AdmitRecord& now) {
    if (!std::binary_search(earlier.begin(), earlier.end(), now, is_lower)) found.push_back(now);
  };
  map_.for_each([&](Key /*key*/, std::uint32_t number) { add_now(of(number)); });
  if (sketch_) {
    sketch_->for_each(
        [&](std::uint64_t cell, std::uint64_t word) { add_now(CountSketch::record(cell, word)); });
  }
  std::sort(found.begin(), found.end(), is_lower);
  return found;
}

std::optional<std::int64_t> Admission::seen_of(Key key,
                                               std::span<const AdmitRecord> records) const {
  const auto count_of = [&](Key wanted) -> std::optional<std::int64_t> {
    const auto found = std::find_if(records.begin(), records.end(),
                                    [&](const AdmitRecord& each) { return each.key == wanted; });
    return found == records.end() ? std::nullopt : std::optional(found->count);
  };
  if (!sketch_) return count_of(key);
  const CountSketch::Cells cells = sketch_->cells_of(key);
  std::int64_t least = kMostSketchCount;
  for (std::size_t row = 0; row < cells.size(); ++row) {
    const std::int64_t word = count_of(CountSketch::record(cells[row], 0).key).value_or(0);
    least = std::min(least, CountSketch::counter(static_cast<std::uint64_t>(word), row));
  }
  return least;
}

std::int64_t Admission::bytes() const {
  const std::size_t own = slabs_.size() * kSlabRecords * sizeof(Record) +
                          groups_.capacity() * sizeof(Group) +
                          in_step_.capacity() * sizeof(AdmissionCall::Counts::value_type) +
                          before_step_.capacity() * sizeof(AdmissionCall::Words::value_type);
  return static_cast<std::int64_t>(own) + map_.stats().bytes + (sketch_ ? sketch_->bytes() : 0);
}

std::string Admission::find_broken(const KeyMap& rows) const {
  map_.check_invariants();
  if (map_.size() + num_free_ != end_) return "a count of a key is neither used nor free";
  std::string what;
  map_.for_each([&](Key key, std::uint32_t number) {
    if (at(number).key != key || at(number).count == 0 || at(number).is_seen)
      what = "the count of key " + std::to_string(key) + " is another's, or of none";
    if (rows.find_one(key)) what = "key " + std::to_string(key) + " has a row and a count";
  });
  std::int64_t num_listed = 0;
  for (const Group& group : groups_) {
    std::uint32_t count = 0;
    for (std::uint32_t n = group.first; n != kNone && count <= group.used;
         n = at(n).next, ++count) {
      if (at(n).next == kNone ? n != group.last : at(at(n).next).previous != n)
        what = "the list of a group's counts is torn";
      if (at(n).next != kNone && at(at(n).next).step < at(n).step)
        what = "the list of a group's counts is out of order";
    }
    if (count != group.used || count > group.quota) what = "a group has another number of counts";
    num_listed += count;
  }
  if (is_limited_ && num_listed != map_.size()) what = "a count is in no group's list";
  if (sketch_ && what.empty()) what = sketch_->find_broken();
  return what;
}

}  // namespace recsdk::internal
