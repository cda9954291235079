// Who waits for what leaves a table is woken. Meant to run under -fsanitize=thread too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "recsdk/recsdk.h"

namespace recsdk::test::leavers_wait_test {
namespace {

constexpr double kSecondsOfAWait = 60.0;  // longer than the test gives itself

using Clock = std::chrono::steady_clock;

/// Whether `is_so` before a time.
template <typename IsSo>
bool comes_before(Clock::time_point end, const IsSo& is_so) {
  while (!is_so()) {
    if (Clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(LeaversWait, EachRowThatLeavesWakesAndSoDoesClosing) {
  constexpr Key kNumKeys = 3000;
  TableConfig config;
  config.dim = 1;
  config.max_rows = 1;
  config.eviction = EvictConfig{};
  Table table(config);
  Leavers leavers = table.leavers({.max_rows = 4});
  std::atomic<std::int64_t> num_read{0};
  std::atomic<bool> has_ended{false};
  std::thread reader([&] {
    std::vector<Key> keys(4);
    while (leavers.wait(kSecondsOfAWait))
      num_read.fetch_add(leavers.read({.capacity = 4, .keys = keys.data()}));
    has_ended.store(true);
  });
  const auto end = Clock::now() + std::chrono::seconds(40);
  float value = 0.0F;
  for (Key key = 0; key < kNumKeys; ++key) {
    table.find_or_insert({&key, 1}, &value);  // the one before leaves
    if (!comes_before(end, [&] { return num_read.load() >= key; })) break;
  }
  EXPECT_EQ(num_read.load(), kNumKeys - 1);
  EXPECT_EQ(leavers.num_lost(), 0U);
  leavers.close();
  EXPECT_TRUE(comes_before(end, [&] { return has_ended.load(); }));
  reader.join();
}

}  // namespace
}  // namespace recsdk::test::leavers_wait_test
