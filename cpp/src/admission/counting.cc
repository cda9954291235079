// What a call changes of the counts: which keys get a record, which leave for them, what they
// count.
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "admission/admission.h"
#include "recsdk/error.h"

namespace recsdk::internal {

using Seen = AdmissionCall::Seen;

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

// Which of the call's keys that found no row get a new record: all, or where the group has too
// little room the highest by the fixed hash.
std::vector<std::uint32_t> Admission::choose_added(const Outcome* outcomes, AdmissionCall& call) {
  std::vector<Candidate> fresh;
  for (std::size_t i = 0; i < call.seen.size(); ++i) {
    const Seen& seen = call.seen[i];
    if (has_row(outcomes[seen.place]) || seen.record != kNone) continue;
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

// What later calls of this step need of it.
void Admission::count_step(AdmissionCall& call) const {
  call.in_step.clear();
  if (!looks_at_step_ || !call.shares_step) return;
  call.in_step.reserve(call.seen.size() + in_step_.size());
  auto earlier = in_step_.begin();
  const auto end = step_of_counts_ == call.step ? in_step_.end() : in_step_.begin();
  for (const Seen& seen : call.seen) {
    for (; earlier != end && earlier->key < seen.key; ++earlier) call.in_step.push_back(*earlier);
    if (earlier != end && earlier->key == seen.key) ++earlier;
    call.in_step.push_back({seen.key, seen.in_step, seen.step_clicks});
  }
  call.in_step.insert(call.in_step.end(), earlier, end);
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

void Admission::prepare(const Outcome* outcomes, AdmissionCall& call, bool shares_step) {
  call.is_prepared = true;
  call.shares_step = shares_step;
  count_step(call);
  if (sketch_) prepare_sketch(call);
  if (most_ == 0) return;
  for (const Seen& seen : call.seen) {
    if (seen.record != kNone) at(seen.record).is_seen = true;
  }
  const std::vector<std::uint32_t> chosen = choose_added(outcomes, call);
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
    while (seen != call.seen.end() && seen->key < counted.key) ++seen;
    return seen != call.seen.end() && seen->key == counted.key && has_row(outcomes[seen->place]);
  });
  for (const auto& each : call.in_step) sketch_->add(each.key, each.count);
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

}  // namespace recsdk::internal
