// All counts at once: read, replaced, and checked.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "admission/admission.h"

namespace recsdk::internal {

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
                  .clicks = keeps_clicks_ ? kept_clicks(records[place].clicks) & kMaxClicks : 0};
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

std::int64_t Admission::latest_step() const noexcept {
  std::int64_t latest = std::numeric_limits<std::int64_t>::min();
  map_.for_each(
      [&](Key /*key*/, std::uint32_t number) { latest = std::max(latest, at(number).step); });
  return latest;
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
