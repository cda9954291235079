#include "eviction/churn.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "util/must.h"
#include "util/prefetch.h"

namespace recsdk::internal {

namespace {

constexpr std::int64_t kMostRecords = 0xFFFFFFFE;

}  // namespace

void check_churn(const EvictConfig& config, const std::string& title,
                 std::optional<std::int64_t> groups) {
  if (!config.churn_steps) return;
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": eviction." + what);
  };
  if (*config.churn_steps < 1) fail(must("churn_steps", "be 1 or more", *config.churn_steps));
  if (config.churn_records < 1 || config.churn_records > kMostRecords)
    fail(must("churn_records", "be 1 to " + std::to_string(kMostRecords), config.churn_records));
  if (groups && config.churn_records < *groups)
    fail(must("churn_records",
              "be at least the number of groups of keys, " + std::to_string(*groups),
              config.churn_records) +
         "; pass as many, or set fewer eviction_groups");
}

Churn::Churn(const EvictConfig& config, std::optional<std::int64_t> groups,
             std::optional<GroupRange> owned, std::uint64_t hash_seed)
    : steps_(config.churn_steps.value_or(1)), mix_(hash_seed) {
  const std::int64_t num_groups = groups.value_or(default_eviction_groups(config.churn_records));
  const GroupRange range = owned.value_or(GroupRange{0, num_groups});
  shift_ = 16 - std::countr_zero(static_cast<std::uint64_t>(num_groups));
  groups_.reserve(static_cast<std::size_t>(num_groups));
  for (std::int64_t group = 0; group < num_groups; ++group) {
    const bool is_owned = group >= range.begin && group < range.end;
    const std::int64_t most = eviction_group_quota(config.churn_records, num_groups, group);
    groups_.emplace_back(is_owned ? static_cast<std::uint32_t>(most) : 0U);
  }
}

// Victims are so already, but for those that looks find.
void Churn::sort_by_group() noexcept {
  const auto is_before = [this](std::uint64_t a, std::uint64_t b) {
    return std::pair(group_of(a), a) < std::pair(group_of(b), b);
  };
  if (!std::is_sorted(hashes_.begin(), hashes_.end(), is_before))
    std::sort(hashes_.begin(), hashes_.end(), is_before);
}

std::uint64_t Churn::count_returned(std::span<const std::uint64_t> hashes,
                                    std::int64_t step) noexcept {
  std::uint64_t count = 0;
  for (std::size_t j = 0; j < hashes.size(); ++j) {
    if (j + kItemsAhead < hashes.size()) {
      const std::uint64_t ahead = hashes[j + kItemsAhead];
      groups_[group_of(ahead)].prefetch(ahead, mix_);
    }
    const std::optional<std::int64_t> left = groups_[group_of(hashes[j])].take(hashes[j], mix_);
    count += static_cast<std::uint64_t>(left && !is_over(*left, step, steps_));
  }
  return count;
}

void Churn::forget(Key key) noexcept {
  const std::uint64_t hash = virtual_shard_hash(static_cast<std::uint64_t>(key));
  groups_[group_of(hash)].take(hash, mix_);
}

void Churn::clear() noexcept {
  for (Departures& group : groups_) group.clear();
}

std::int64_t Churn::bytes() const noexcept {
  std::size_t bytes =
      groups_.capacity() * sizeof(Departures) + hashes_.capacity() * sizeof(std::uint64_t);
  for (const Departures& group : groups_) bytes += group.bytes();
  return static_cast<std::int64_t>(bytes);
}

std::string Churn::find_broken(const KeyMap& rows) const {
  for (const Departures& group : groups_) {
    if (std::string what = group.find_broken(rows, mix_); !what.empty()) return what;
  }
  return "";
}

}  // namespace recsdk::internal
