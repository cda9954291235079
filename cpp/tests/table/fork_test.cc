// A forked child uses a table of its parent, whose pool threads it does not have.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "children_of_fork.h"
#include "recsdk/recsdk.h"
#include "row_files_in_memory.h"
#include "util/memory.h"

namespace recsdk::test::fork_test {
namespace {

constexpr std::size_t kKeys = 40'000;  // enough for every thread of the pool

std::vector<Key> range(Key first) {
  std::vector<Key> keys(kKeys);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

TableConfig config() {
  TableConfig config;
  config.dim = 4;
  config.initializer = InitializerConfig::normal(0.0F, 1.0F);
  return config;
}

thread_local bool takes_long = false;
std::atomic<bool> is_taking_pages{false};

/// Has a thread that takes pages stay there until somebody may have begun to fork.
void take_long(std::size_t) {
  if (!takes_long) return;
  is_taking_pages.store(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

class ForkTest : public testing::Test {
 protected:
  ForkTest() {
    set_num_threads(3);
    table_.find_or_insert(range(0), values_.data());  // starts the pool
  }
  ~ForkTest() override { set_num_threads(threads_before_); }

  int threads_before_ = num_threads();
  Table table_{config()};
  std::vector<float> values_ = std::vector<float>(kKeys * 4);
};

TEST_F(ForkTest, TheChildReadsAndGrowsItsCopy) {
  const int status = status_of_child([&] {
    std::vector<float> read(values_.size());
    table_.lookup(range(0), read.data());
    if (read != values_) return false;
    table_.find_or_insert(range(-1'000'000), read.data());
    table_.check_invariants();
    return table_.size() == 2 * static_cast<std::int64_t>(kKeys) && num_threads() == 3;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(table_.size(), static_cast<std::int64_t>(kKeys));
}

TEST_F(ForkTest, TheParentGoesOn) {
  EXPECT_EQ(status_of_child([] { return true; }), 0);
  std::vector<float> read(values_.size());
  table_.lookup(range(0), read.data());
  EXPECT_EQ(read, values_);
}

TEST_F(ForkTest, AChildOfAChildWorksToo) {
  const int status = status_of_child([&] {
    return status_of_child([&] {
             std::vector<float> read(values_.size());
             table_.lookup(range(0), read.data());
             return read == values_;
           }) == 0;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(ForkTest, TheChildEndsInOrder) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    table_.find_or_insert(range(7'000'000), values_.data());
    std::exit(0);  // runs destructors of statics, the pool's among them
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// While another thread of the parent writes a cut and updates wait for it.
TEST_F(ForkTest, TheChildOfASavingParentGoesOn) {
  std::vector<float> gradients(kKeys * 4, 1.0F);
  for (int i = 0; i < 10; ++i) {
    Cut cut = table_.cut({.changes_only = false, .max_copy_bytes = 1});
    table_.apply_gradients(std::vector<Key>{-1, 5}, gradients.data());
    std::thread writing([&] {
      MemorySink sink([&] { std::this_thread::yield(); });
      WriteOptions options;
      options.file = {.codec = Codec::kNone, .block_bytes = 4096, .in_background = false};
      write_rows(cut, sink, options);
    });
    const int status = status_of_child([&] {
      table_.apply_gradients(range(0), gradients.data());  // does not wait for who is not there
      return table_.update_count() > 0;
    });
    EXPECT_EQ(status, 0);
    writing.join();
  }
}

// While another thread of the parent readies memory for copies: the child finds no lock taken.
TEST_F(ForkTest, TheChildOfAParentThatReadiesMemoryGoesOn) {
  constexpr std::int64_t kDim = 64;  // so large that memory is readied
  TableConfig large = config();
  large.dim = kDim;
  Table table(large);
  std::vector<float> values(kKeys * kDim, 1.0F);
  table.find_or_insert(range(0), values.data());
  for (int i = 0; i < 5; ++i) {
    Cut cut = table.cut({});
    is_taking_pages.store(false);
    std::thread preparing([&] {
      takes_long = true;
      internal::set_page_allocation_hook(take_long);
      cut.prepare_copies();
      internal::set_page_allocation_hook(nullptr);
      is_taking_pages.store(true);
    });
    while (!is_taking_pages.load()) std::this_thread::yield();
    const int status = status_of_child([&] {
      table.apply_gradients(range(0), values.data());
      return cut.copied_bytes() > 0;
    });
    EXPECT_EQ(status, 0);
    preparing.join();
  }
}

// Updates wait for the pool, who writes a cut for updates, and a fork for who writes a cut.
TEST_F(ForkTest, BesideThreadsThatUpdateAndWriteCuts) {
  std::atomic<bool> stops{false};
  std::vector<float> gradients(kKeys * 4, 1.0F);
  std::thread updating([&] {
    while (!stops.load()) table_.apply_gradients(range(0), gradients.data());
  });
  std::thread saving([&] {
    while (!stops.load()) {
      Cut cut = table_.cut({});
      cut.prepare_copies();
      MemorySink sink;
      write_rows(cut, sink, {});
    }
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(status_of_child([] { return true; }), 0);
  stops.store(true);
  updating.join();
  saving.join();
}

// Whether or not the cut has been finished when the child is made, it can be finished there.
TEST_F(ForkTest, BesideAThreadThatFinishesACut) {
  for (int i = 0; i < 60; ++i) {
    Cut cut = table_.cut({});
    std::atomic<bool> goes{false};
    std::thread finishing([&] {
      while (!goes.load()) std::this_thread::yield();
      cut.finish(false);
    });
    goes.store(true);
    const int status = status_of_child([&] {
      cut.finish(false);
      return table_.cut({}).num_rows() > 0;
    });
    EXPECT_EQ(status, 0);
    finishing.join();
  }
}

/// A table of few rows, with a reader of those that leave.
struct Leaving {
  Leaving() {
    TableConfig small = config();
    small.max_rows = 8;
    small.eviction = EvictConfig{};
    table.emplace(small);
    leavers.emplace(table->leavers({.max_rows = 100'000}));
  }
  void insert_others(Key first) {
    std::vector<Key> keys(8);
    std::iota(keys.begin(), keys.end(), first);
    std::vector<float> values(keys.size() * 4);
    table->find_or_insert(keys, values.data());
  }
  std::int64_t read() {
    std::vector<Key> keys(16);
    return leavers->read({.capacity = std::ssize(keys), .keys = keys.data()});
  }

  std::optional<Table> table;
  std::optional<Leavers> leavers;
};

/// Reads on a thread of its own for as long as this lives, and waits where there is nothing.
class Reading {
 public:
  explicit Reading(Leaving& of)
      : thread_([this, &of] {
          while (!stops_.load()) {
            of.leavers->wait(0.01);
            num_read.fetch_add(of.read());
          }
        }) {}
  ~Reading() {
    stops_.store(true);
    thread_.join();
  }

  std::atomic<std::int64_t> num_read{0};

 private:
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

#if !defined(__SANITIZE_THREAD__)  // which takes the child's reader for the parent's
// Readers of what leaves wait most of the time. The child has a reader of its own.
TEST_F(ForkTest, BesideAThreadThatReadsWhatLeaves) {
  Leaving of;
  of.insert_others(0);
  Reading reading(of);
  for (int i = 1; i <= 50; ++i) {
    of.insert_others(1000 * i);
    const int status = status_of_child([&] {
      Reading own(of);
      for (int j = 1; j <= 10; ++j) {
        const std::int64_t before = own.num_read.load();
        of.insert_others(1000 * i + 100 * j);
        while (own.num_read.load() == before) std::this_thread::yield();
      }
      return true;
    });
    ASSERT_EQ(status, 0);
  }
}
#endif

TEST_F(ForkTest, BesideAThreadThatClosesAReader) {
  Leaving of;
  std::atomic<bool> stops{false};
  std::thread closing([&] {
    while (!stops.load()) of.leavers->close();
  });
  int status = 0;
  for (int i = 0; i < 400 && status == 0; ++i)
    status = status_of_child([&] { return of.leavers->size() == 0; });
  EXPECT_EQ(status, 0);
  stops.store(true);
  closing.join();
}

TEST_F(ForkTest, TheChildLetsGoOfWhatAnotherThreadWaitsFor) {
  Leaving of;
  std::thread waiting([&] { of.leavers->wait(60.0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const int status = status_of_child([&] {
    of.leavers.reset();
    of.table.reset();
    return true;
  });
  EXPECT_EQ(status, 0);
  of.leavers->close();
  waiting.join();
}

}  // namespace
}  // namespace recsdk::test::fork_test
