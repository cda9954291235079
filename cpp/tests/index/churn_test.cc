// Which keys left a while ago, against a map that is looked through as a whole.
#include "eviction/churn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace recsdk::internal::churn_test {
namespace {

struct Left {
  Key key = 0;
};

std::uint64_t hash_of(Key key) { return virtual_shard_hash(static_cast<std::uint64_t>(key)); }

/// As policy.h says, of all keys at once.
class Model {
 public:
  Model(const EvictConfig& config, std::int64_t num_groups)
      : steps_(*config.churn_steps), records_(config.churn_records), num_groups_(num_groups) {}

  void note_left(const std::vector<Left>& leaving, std::int64_t step) {
    std::erase_if(left_, [&](const auto& each) { return is_late(each.second, step); });
    for (const Left& each : leaving) left_[each.key] = step;
    std::map<std::int64_t, std::vector<std::pair<std::int64_t, std::uint64_t>>> groups;
    for (const auto& [key, at] : left_)
      groups[eviction_group(key, num_groups_)].emplace_back(at, hash_of(key));
    for (auto& [group, among] : groups) {
      std::sort(among.begin(), among.end());
      const std::int64_t excess =
          std::ssize(among) - eviction_group_quota(records_, num_groups_, group);
      for (std::int64_t n = 0; n < excess; ++n) {
        left_.erase(static_cast<Key>(virtual_shard_key(among[static_cast<std::size_t>(n)].second)));
        ++num_lost;
      }
    }
  }
  std::uint64_t count_returned(const std::vector<Key>& keys, std::int64_t step) {
    std::uint64_t count = 0;
    for (const Key key : keys) {
      const auto found = left_.find(key);
      if (found == left_.end()) continue;
      count += static_cast<std::uint64_t>(!is_late(found->second, step));
      left_.erase(found);
    }
    return count;
  }
  void forget(Key key) { left_.erase(key); }
  void clear() { left_.clear(); }
  bool contains(Key key) const { return left_.contains(key); }

  std::uint64_t num_lost = 0;

 private:
  bool is_late(std::int64_t left, std::int64_t step) const {
    __extension__ using Wide = __int128;
    return Wide{step} - Wide{left} > Wide{steps_};
  }

  std::int64_t steps_;
  std::int64_t records_;
  std::int64_t num_groups_;
  std::map<Key, std::int64_t> left_;
};

class Churned : public testing::TestWithParam<std::uint64_t> {
 protected:
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(end));
  }
  // Keys of which some were drawn before.
  std::vector<Key> draw() {
    std::unordered_set<Key> drawn;
    for (std::int64_t n = below(40); n > 0; --n) drawn.insert(below(num_keys_) * 0x9E3779B97F4A7);
    return {drawn.begin(), drawn.end()};
  }

  std::mt19937_64 random_{GetParam()};
  std::int64_t num_keys_ = 1 + below(400);
};

// Keys come and leave, in steps that several calls share or that are far apart.
TEST_P(Churned, AsTheModel) {
  const std::int64_t num_groups = std::int64_t{1} << below(4);
  const EvictConfig config{.churn_steps = below(2) == 0 ? 1 + below(6) : INT64_MAX,
                           .churn_records = num_groups + below(200)};
  Churn churn(config, num_groups, std::nullopt, random_());
  Model model(config, num_groups);
  const KeyMap no_rows(1);
  std::int64_t step = below(2) == 0 ? 0 : INT64_MIN;
  for (int call = 0; call < 400; ++call) {
    if (below(3) == 0) step += below(3);
    if (below(200) == 0) step = std::max(step, std::int64_t{1} << 60) + 9;
    const std::vector<Key> came = draw();
    std::vector<std::uint64_t> hashes(came.size());
    std::transform(came.begin(), came.end(), hashes.begin(), hash_of);
    ASSERT_EQ(churn.count_returned(hashes, step), model.count_returned(came, step));
    std::vector<Left> leaving;
    for (const Key key : draw()) {
      if (!model.contains(key)) leaving.push_back({key});
    }
    const auto some = static_cast<std::ptrdiff_t>(below(std::ssize(leaving) + 1));
    const std::vector<Left> first(leaving.begin(), leaving.begin() + some);
    const std::vector<Left> rest(leaving.begin() + some, leaving.end());
    churn.prepare(leaving);
    for (const std::vector<Left>& part : {first, rest}) {
      churn.note_left(part, step);
      model.note_left(part, step);
    }
    ASSERT_EQ(churn.num_lost(), model.num_lost);
    ASSERT_EQ(churn.find_broken(no_rows), "");
    if (below(50) == 0) {
      const Key key = below(num_keys_) * 0x9E3779B97F4A7;
      churn.forget(key);
      model.forget(key);
    }
    if (below(300) == 0) {
      churn.clear();
      model.clear();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Churned, testing::Range<std::uint64_t>(0, 40));

// A key that leaves and comes back for ever takes no more and more memory.
TEST(Churn, KeepsNothingOfWhoCameBack) {
  const EvictConfig config{.churn_steps = INT64_MAX, .churn_records = 1 << 20};
  Churn churn(config, 1, std::nullopt, 1);
  const std::vector<Left> leaving = {{1}, {2}, {3}};
  const std::vector<std::uint64_t> hashes = {hash_of(1), hash_of(2), hash_of(3)};
  for (std::int64_t step = 0; step < 100'000; ++step) {
    churn.prepare(leaving);
    churn.note_left(leaving, step);
    ASSERT_EQ(churn.count_returned(hashes, step + 1), 3U);
  }
  EXPECT_LT(churn.bytes(), 10'000);
  EXPECT_EQ(churn.num_lost(), 0U);
}

}  // namespace
}  // namespace recsdk::internal::churn_test
