#include "eviction/churn.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

namespace recsdk::internal {

namespace {

constexpr std::int64_t kMostRecords = 0xFFFFFFFE;

// Steps may be any numbers.
std::int64_t elapsed(std::int64_t from, std::int64_t to) {
  std::int64_t steps = 0;
  if (to <= from) return 0;
  return __builtin_sub_overflow(to, from, &steps) ? std::numeric_limits<std::int64_t>::max()
                                                  : steps;
}

}  // namespace

void check_churn(const EvictConfig& config, const std::string& title,
                 std::optional<std::int64_t> groups) {
  if (!config.churn_steps) return;
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": eviction." + what);
  };
  if (*config.churn_steps < 1)
    fail("churn_steps is " + std::to_string(*config.churn_steps) + "; pass 1 or more");
  if (config.churn_records < 1 || config.churn_records > kMostRecords)
    fail("churn_records is " + std::to_string(config.churn_records) + "; pass 1 to " +
         std::to_string(kMostRecords));
  if (groups && config.churn_records < *groups)
    fail("churn_records is " + std::to_string(config.churn_records) + ", and keys fall into " +
         std::to_string(*groups) + " groups; pass as many, or set fewer eviction_groups");
}

Churn::Churn(const EvictConfig& config, std::optional<std::int64_t> groups,
             std::optional<GroupRange> owned, std::uint64_t hash_seed)
    : steps_(config.churn_steps.value_or(1)), hash_(hash_seed) {
  const std::int64_t num_groups = groups.value_or(default_eviction_groups(config.churn_records));
  const GroupRange range = owned.value_or(GroupRange{0, num_groups});
  shift_ = 16 - std::countr_zero(static_cast<std::uint64_t>(num_groups));
  groups_.resize(static_cast<std::size_t>(num_groups));
  for (std::int64_t group = range.begin; group < range.end; ++group) {
    const auto quota =
        static_cast<std::uint32_t>(eviction_group_quota(config.churn_records, num_groups, group));
    groups_[static_cast<std::size_t>(group)].quota = quota;
    most_ += quota;
  }
  chains_.assign(std::bit_ceil(std::max<std::uint64_t>(most_, 1)), kNone);
}

void Churn::prepare(std::size_t num_keys) {
  scratch_.reserve(num_keys);
  const std::uint64_t wanted = std::min(most_, end_ - num_free_ + std::uint64_t{num_keys});
  while (slabs_.size() * kSlabRecords < std::max(wanted, std::uint64_t{end_}))
    slabs_.push_back(std::make_unique<Record[]>(kSlabRecords));
}

bool Churn::is_over(std::uint32_t number, std::int64_t step) const noexcept {
  return elapsed(at(number).step, step) > steps_;
}

// The highest come first, so that those that stay are the same however a step is divided.
void Churn::add_hashes(std::int64_t step) noexcept {
  std::sort(scratch_.begin(), scratch_.end());
  for (const std::uint64_t hash : scratch_) {
    Group& group = group_of_hash(hash);
    make_room(group, hash, step);
    if (group.used < group.quota) add(group, hash, step);
  }
}

// Takes out what no key can come back to in time, and the lowest record if there is no room; unless
// that would be the one for which room is made.
void Churn::make_room(Group& group, std::uint64_t hash, std::int64_t step) noexcept {
  while (group.first != kNone && is_over(group.first, step)) take(at(group.first).key);
  if (group.used < group.quota) return;
  ++num_lost_;
  if (group.first != kNone && place(group.first) < Place(step, hash)) take(at(group.first).key);
}

void Churn::add(Group& group, std::uint64_t hash, std::int64_t step) noexcept {
  std::uint32_t number = end_;
  if (num_free_ > 0) {
    number = std::exchange(first_free_, at(first_free_).next);
    --num_free_;
  } else {
    ++end_;
  }
  std::uint32_t before = group.last;
  while (before != kNone && Place(step, hash) < place(before)) before = at(before).previous;
  std::uint32_t& next = before == kNone ? group.first : at(before).next;
  const auto key = static_cast<Key>(virtual_shard_key(hash));
  at(number) = {key, step, before, next, chain(key)};
  (next == kNone ? group.last : at(next).previous) = number;
  next = number;
  chain(key) = number;
  ++group.used;
}

// Takes out the key's record, if it has one: the step in which it left.
std::optional<std::int64_t> Churn::take(Key key) noexcept {
  std::uint32_t* link = &chain(key);
  while (*link != kNone && at(*link).key != key) link = &at(*link).chained;
  if (*link == kNone) return std::nullopt;
  const std::uint32_t number = *link;
  const Record taken = at(number);
  Group& group = group_of_hash(hash_of(key));
  *link = taken.chained;
  (taken.previous == kNone ? group.first : at(taken.previous).next) = taken.next;
  (taken.next == kNone ? group.last : at(taken.next).previous) = taken.previous;
  --group.used;
  at(number) = {.next = first_free_};
  first_free_ = number;
  ++num_free_;
  return taken.step;
}

bool Churn::comes_back(Key key, std::int64_t step) noexcept {
  const std::optional<std::int64_t> left = take(key);
  return left && elapsed(*left, step) <= steps_;
}

void Churn::clear() noexcept {
  std::fill(chains_.begin(), chains_.end(), kNone);
  slabs_.clear();
  end_ = num_free_ = 0;
  first_free_ = kNone;
  for (Group& group : groups_) group = {.quota = group.quota};
}

std::int64_t Churn::bytes() const noexcept {
  return static_cast<std::int64_t>(
      slabs_.size() * kSlabRecords * sizeof(Record) + groups_.capacity() * sizeof(Group) +
      chains_.capacity() * sizeof(std::uint32_t) + scratch_.capacity() * sizeof(std::uint64_t));
}

std::string Churn::find_broken(const KeyMap& rows) const {
  std::uint64_t num_listed = num_free_;
  for (const Group& group : groups_) {
    std::uint32_t count = 0;
    for (std::uint32_t n = group.first; n != kNone && count <= group.used;
         n = at(n).next, ++count) {
      const std::uint32_t next = at(n).next;
      if (next == kNone ? n != group.last : at(next).previous != n || !(place(n) < place(next)))
        return "the list of keys that left is torn or out of order";
      if (rows.find_one(at(n).key))
        return "key " + std::to_string(at(n).key) + " has a row and is among those that left";
    }
    if (count != group.used || count > group.quota)
      return "a group has another number of keys that left";
    num_listed += count;
  }
  return num_listed == end_ ? "" : "the record of a key that left is neither used nor free";
}

}  // namespace recsdk::internal
