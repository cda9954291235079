// A thread that saves beside training waits for updates, but not for ever.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "recsdk/recsdk.h"
#include "saving_tables.h"
#include "table/cut.h"

namespace recsdk::test::give_way_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr std::int64_t kDim = 16;
constexpr auto kNap = microseconds(100);
constexpr int kPatience = 4;
constexpr nanoseconds kFirstPatience = milliseconds(100);

nanoseconds processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

void work(nanoseconds time) {
  const nanoseconds until = processor_time() + time;
  while (processor_time() < until) {
  }
}

/// Times that this thread has gone to sleep.
std::int64_t num_naps() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

TableConfig config() {
  TableConfig config;
  config.dim = kDim;
  config.optimizer = OptimizerConfig::sgd(1.0F);
  return config;
}

class GiveWayTest : public testing::Test {
 protected:
  GiveWayTest() : table_(config()), keys_(20'000) {
    std::iota(keys_.begin(), keys_.end(), Key{0});
    std::vector<float> values(keys_.size() * kDim);
    table_.find_or_insert(keys_, values.data());
    cut_.emplace(table_.cut({}));
  }

  /// As an update does while it runs.
  class Update {
   public:
    explicit Update(GiveWayTest& test) : count_(test.num_updating()) { ++count_; }
    Update(const Update&) = delete;
    Update& operator=(const Update&) = delete;
    ~Update() { --count_; }

   private:
    std::atomic<int>& count_;
  };

  std::atomic<int>& num_updating() { return CutAccess::impl(*cut_).table->num_updating; }

  struct Wait {
    std::int64_t naps;
    std::int64_t most_naps;  // in four times as long as it has worked since it gave way before
    nanoseconds passed;
  };
  Wait give_way() {
    constexpr std::int64_t kSlack = 5;  // of what measuring takes, and for switches by the system
    const std::int64_t naps = num_naps();
    const auto begin = std::chrono::steady_clock::now();
    const nanoseconds worked = processor_time() - before_;
    CutAccess::impl(*cut_).give_way();
    before_ = processor_time();
    const auto passed = std::chrono::steady_clock::now() - begin;
    return {num_naps() - naps, kPatience * worked / kNap + kSlack, passed};
  }

  Table table_;
  std::vector<Key> keys_;
  std::optional<Cut> cut_;
  nanoseconds before_ = processor_time();
};

// A nap is a switch to another thread, of which a busy machine may bring one of its own.
TEST_F(GiveWayTest, NobodyWaitsWhenNoUpdateRuns) {
  std::int64_t least = INT64_MAX;
  for (int i = 0; i < 20; ++i) {
    work(milliseconds(1));
    least = std::min(least, give_way().naps);
  }
  EXPECT_EQ(least, 0);
}

TEST_F(GiveWayTest, TheFirstTimeItWaitsForATenthOfASecondAtMost) {
  const Update update(*this);
  const Wait wait = give_way();
  EXPECT_GE(wait.passed, kFirstPatience);
  EXPECT_LE(wait.naps, kFirstPatience / kNap + 5);
}

TEST_F(GiveWayTest, ThenItWaitsFourTimesAsLongAsItHasWorked) {
  const Update update(*this);
  give_way();
  for (const auto time : {milliseconds(0), milliseconds(2), milliseconds(10)}) {
    work(time);
    const Wait wait = give_way();
    EXPECT_GE(wait.passed, kPatience * time);
    EXPECT_LE(wait.naps, wait.most_naps);
  }
}

TEST_F(GiveWayTest, ItWaitsUntilTheUpdateEnds) {
  give_way();
  work(milliseconds(200));
  std::atomic<bool> has_ended{false};
  num_updating().store(1);
  std::thread updating([&] {
    std::this_thread::sleep_for(milliseconds(2));
    has_ended.store(true);
    num_updating().store(0);
  });
  give_way();
  EXPECT_TRUE(has_ended.load());
  updating.join();
}

// The writer takes a fifth of the time at least, however long the update.
TEST_F(GiveWayTest, AnUpdateWithoutEndDoesNotKeepASaveFromEnding) {
  const std::vector<FileRow> rows = visible_rows(table_);
  const Update update(*this);
  MemorySink sink;
  write_rows(*cut_, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
  EXPECT_EQ(read_all(open(sink.content)).rows, rows);
}

TEST_F(GiveWayTest, UpdatesOneAfterAnotherDoNotEither) {
  const std::vector<FileRow> rows = visible_rows(table_);
  const std::vector<float> gradients(keys_.size() * kDim, 1.0F);
  std::atomic<bool> stops{false};
  std::atomic<int> num_updates{0};
  std::thread training([&] {
    while (!stops.load()) {
      table_.apply_gradients(keys_, gradients.data());
      ++num_updates;
    }
  });
  while (num_updating().load() == 0) std::this_thread::yield();  // an update counts itself
  MemorySink sink;
  write_rows(*cut_, sink, {.token = {}, .file = tiny_blocks(), .progress = {}});
  stops.store(true);
  training.join();
  EXPECT_EQ(num_updating().load(), 0);
  EXPECT_EQ(read_all(open(sink.content)).rows, rows);
  EXPECT_GT(num_updates.load(), 0);
}

}  // namespace
}  // namespace recsdk::test::give_way_test
