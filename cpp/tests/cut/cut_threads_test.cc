// Cuts beside a thread that trains: meant for the thread sanitizer as much as for its assertions.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "profile.h"
#include "recsdk/recsdk.h"
#include "saving_tables.h"

namespace recsdk::test::cut_threads_test {
namespace {

constexpr std::int64_t kDim = 600;  // copies lie in several regions
constexpr std::int64_t kKeysABirth = 50;
constexpr std::int64_t kLife = 12;  // updates until a key leaves

// Keys are born with weight 0 before update number `birth` + 1 and lose 1 in each update, so that
// every row of a cut tells how many updates it has seen.
class Trainer {
 public:
  Trainer() : table_(config()) { grow(0); }

  static TableConfig config() {
    TableConfig config;
    config.dim = kDim;
    config.optimizer = OptimizerConfig::sgd(1.0F);
    config.num_threads = 2;
    return config;
  }

  Table& table() { return table_; }

  void step() {
    const std::vector<float> gradients(keys_.size() * kDim, 1.0F);
    table_.apply_gradients(keys_, gradients.data());
    ++count_;
    if (count_ >= kLife) shrink(count_ - kLife);
    grow(count_);
  }

  /// Steps in a thread of its own while body() runs.
  void beside(const std::function<void()>& body) {
    std::atomic<bool> stops{false};
    std::thread thread([&] {
      while (!stops.load()) step();
    });
    body();
    stops.store(true);
    thread.join();
  }

 private:
  void grow(std::int64_t birth) {
    std::vector<Key> born;
    for (std::int64_t i = 0; i < kKeysABirth; ++i) born.push_back(birth * kKeysABirth + i);
    std::vector<float> values(born.size() * kDim);
    // Ahead, as a pipeline does it.
    const Lease lease = table_.lease(birth);
    table_.find_or_insert(born, values.data(), {}, &lease);
    keys_.insert(keys_.end(), born.begin(), born.end());
  }
  void shrink(std::int64_t birth) {
    std::vector<Key> dead;
    for (std::int64_t i = 0; i < kKeysABirth; ++i) dead.push_back(birth * kKeysABirth + i);
    table_.erase(dead);
    std::erase_if(keys_, [&](Key key) { return key / kKeysABirth == birth; });
  }

  Table table_;
  std::vector<Key> keys_;
  std::int64_t count_ = 0;
};

/// Checks that rows are those of one moment, that of update number `count`.
void check_rows(const std::map<Key, std::string>& rows, std::int64_t count) {
  std::map<std::int64_t, std::int64_t> births;
  for (const auto& [key, values] : rows) {
    const std::int64_t birth = key / kKeysABirth;
    ++births[birth];
    std::vector<float> weights(kDim);
    std::memcpy(weights.data(), values.data(), kDim * sizeof(float));
    for (const float weight : weights) ASSERT_EQ(weight, static_cast<float>(birth - count));
  }
  for (const auto& [birth, n] : births) {
    ASSERT_EQ(n, kKeysABirth);
    ASSERT_LE(birth, count);
    ASSERT_GE(birth, count - kLife);
  }
  for (std::int64_t birth = std::max<std::int64_t>(count - kLife + 1, 0); birth < count; ++birth)
    ASSERT_TRUE(births.contains(birth)) << birth << " of " << count;
}

Bytes write(Cut& cut, std::uint8_t token, bool in_background) {
  MemorySink sink([] { std::this_thread::yield(); });
  WriteOptions options;
  options.token = {token};
  options.file = {.codec = Codec::kNone, .block_bytes = 16'384, .in_background = in_background};
  write_rows(cut, sink, options);
  return sink.content;
}

class CutThreadsTest : public testing::TestWithParam<std::optional<std::int64_t>> {};

TEST_P(CutThreadsTest, FullCutsAreOfOneMoment) {
  Trainer trainer;
  trainer.beside([&] {
    for (int i = 0; i < (is_full_profile() ? 12 : 4); ++i) {
      Cut cut = trainer.table().cut({.changes_only = false, .max_copy_bytes = GetParam()});
      const Bytes file = write(cut, 1, i % 2 == 0);
      check_rows(by_key(read_all(open(file)).rows), static_cast<std::int64_t>(cut.update_count()));
    }
  });
  trainer.table().check_invariants();
  EXPECT_EQ(trainer.table().stats().checkpoint_copied_bytes, 0);
}

TEST_P(CutThreadsTest, ChainsOfDeltasAreOfOneMomentEach) {
  Trainer trainer;
  std::vector<Bytes> chain;
  const std::uint8_t num_cuts = is_full_profile() ? 10 : 4;
  trainer.beside([&] {
    for (std::uint8_t i = 0; i < num_cuts; ++i) {
      Cut cut = trainer.table().cut({.changes_only = i > 0, .max_copy_bytes = GetParam()});
      Bytes file = write(cut, i, i % 2 == 0);
      const bool is_durable = i % 3 != 1;
      cut.finish(is_durable);
      if (!is_durable) continue;
      chain.push_back(std::move(file));
      Table copy(Trainer::config());
      restore_into(copy, chain);
      check_rows(by_key(visible_rows(copy)), static_cast<std::int64_t>(cut.update_count()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Limits, CutThreadsTest,
                         testing::Values(std::nullopt, 0, 300'000, 100'000'000));

TEST(CutThreadsTest, UpdatesBeyondTheLimitWaitForTheReader) {
  Trainer trainer;
  Table& table = trainer.table();
  for (int i = 0; i < 5; ++i) trainer.step();
  Cut cut = table.cut({.changes_only = false, .max_copy_bytes = 1});
  const std::vector<Key> first = {100};
  const std::vector<Key> second = {200};
  const std::vector<float> gradient(kDim, 1.0F);
  table.apply_gradients(first, gradient.data());  // needs more than the limit, alone
  EXPECT_GT(cut.copied_bytes(), 1);
  std::atomic<bool> is_done{false};
  std::thread waiting([&] {
    table.apply_gradients(second, gradient.data());
    is_done.store(true);
  });
  while (table.stats().checkpoint_waits == 0) std::this_thread::yield();
  EXPECT_FALSE(is_done.load());
  check_rows(by_key(read_all(open(write(cut, 1, false))).rows), 5);
  waiting.join();
  EXPECT_EQ(table.stats().checkpoint_waits, 1U);
  EXPECT_GT(table.stats().checkpoint_wait_seconds, 0.0);
}

TEST(CutThreadsTest, AbandoningACutLetsWaitingUpdatesGo) {
  for (const bool is_destroyed : {false, true}) {
    Trainer trainer;
    Table& table = trainer.table();
    for (int i = 0; i < 5; ++i) trainer.step();
    std::optional<Cut> cut(table.cut({.changes_only = false, .max_copy_bytes = 1}));
    const std::vector<float> gradient(kDim, 1.0F);
    const std::vector<Key> first = {100};
    const std::vector<Key> second = {200};
    table.apply_gradients(first, gradient.data());
    std::thread waiting([&] { table.apply_gradients(second, gradient.data()); });
    while (table.stats().checkpoint_waits == 0) std::this_thread::yield();
    if (is_destroyed) {
      cut.reset();
    } else {
      cut->finish(true);
    }
    waiting.join();
  }
}

TEST(CutThreadsTest, UpsertsAndNewRowsInUsedPlacesWaitToo) {
  for (const bool upserts : {false, true}) {
    Trainer trainer;
    Table& table = trainer.table();
    for (int i = 0; i < 5; ++i) trainer.step();
    Cut cut = table.cut({.changes_only = false, .max_copy_bytes = 1});
    const std::vector<float> values(kDim * 2, 1.0F);
    table.apply_gradients(std::vector<Key>{100}, values.data());
    if (!upserts) table.erase(std::vector<Key>{201, 202});
    std::thread waiting([&] {
      std::vector<float> found(kDim * 2);
      if (upserts) {
        table.upsert(std::vector<Key>{201, 202}, values.data());
      } else {
        table.find_or_insert(std::vector<Key>{-1, -2}, found.data());
      }
    });
    // stats() needs a lock that these calls hold while they wait.
    check_rows(by_key(read_all(open(write(cut, 1, false))).rows), 5);
    waiting.join();
    table.check_invariants();
  }
}

// The keys that left are the table's again once the cut is finished.
TEST(CutThreadsTest, FinishingADeltaWhileItsErasedKeysAreWrittenEndsThat) {
  constexpr std::size_t kNumKeys = 100'000;
  TableConfig config;
  config.dim = 1;
  Table table(config);
  std::vector<Key> keys(kNumKeys);
  std::iota(keys.begin(), keys.end(), Key{0});
  std::vector<float> values(kNumKeys);
  for (int i = 0; i < 30; ++i) {
    table.find_or_insert(keys, values.data());
    save(table);
    table.erase(keys);
    Cut cut = table.cut({.changes_only = true, .max_copy_bytes = {}});
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * i));
      cut.finish(i % 2 == 0);
    });
    try {
      EXPECT_EQ(read_all(open(write(cut, 1, false))).erased.size(), kNumKeys);
    } catch (const std::invalid_argument&) {
      // It was finished before this began.
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBusy);
    }
    other.join();
  }
}

TEST(CutThreadsTest, AFinishedCutCannotBeReadOn) {
  Trainer trainer;
  std::optional<Cut> cut(trainer.table().cut({}));
  MemorySink sink([&] { cut->finish(false); });
  WriteOptions options;
  options.file = {.codec = Codec::kNone, .block_bytes = 4096, .in_background = false};
  try {
    write_rows(*cut, sink, options);
    FAIL() << "a finished cut was read to its end";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBusy);
  }
  EXPECT_THROW(write_rows(*cut, sink, options), std::invalid_argument);
}

}  // namespace
}  // namespace recsdk::test::cut_threads_test
