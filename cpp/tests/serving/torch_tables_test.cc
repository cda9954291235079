// Which tables the operators of exported models read: of one freeze for each program, opened once,
// while nobody else waits, and as before when memory runs out. What reads manifests is replaced
// here by a list, so neither torch nor Boost is needed.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "failing_operator_new.h"
#include "recsdk/serving/torch.h"
#include "support/frozen_tables.h"
#include "torch/frozen_place.h"
#include "torch/tables.h"

namespace recsdk::test::torch_tables_test {
namespace {

/// What lies at paths, in place of manifests.
struct Paths {
  std::mutex mutex;
  std::map<std::string, serving_torch::Frozen> frozen;
  std::map<std::string, std::function<void()>> before_reading;
  std::map<std::string, int> num_reads;
};

Paths& paths() {
  static Paths all;
  return all;
}

}  // namespace
}  // namespace recsdk::test::torch_tables_test

namespace recsdk::serving_torch {

/// "group path name".
Place parse_place(std::string_view text) {
  const std::size_t path = text.find(' ') + 1;
  const std::size_t name = text.find(' ', path) + 1;
  Place place;
  place.group = text.substr(0, name - 1);
  place.path = text.substr(path, name - 1 - path);
  place.name = text.substr(name);
  return place;
}

Frozen read_frozen(const Place& place) {
  auto& all = test::torch_tables_test::paths();
  std::function<void()> before;
  {
    const std::lock_guard lock(all.mutex);
    ++all.num_reads[place.path];
    before = all.before_reading[place.path];
  }
  const auto now = [&] {
    const std::lock_guard lock(all.mutex);
    const auto found = all.frozen.find(place.path);
    if (found == all.frozen.end()) throw std::runtime_error(place.path + ": nothing is there");
    return found->second;
  };
  const Frozen read = now();
  if (before) before();
  return read;
}

}  // namespace recsdk::serving_torch

namespace recsdk::test::torch_tables_test {
namespace {

using serving_torch::Table;

constexpr std::int64_t kDim = 2;

/// A frozen checkpoint whose rows tell which freeze they are of.
class Checkpoint {
 public:
  Checkpoint() : path_(folder_.path()) {}
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint() {
    recsdk_serving_torch_close(path_.c_str());
    const std::lock_guard lock(paths().mutex);
    paths().frozen.erase(path_);
    paths().before_reading.erase(path_);
  }

  const std::string& path() const { return path_; }
  std::string place(const std::string& name, const std::string& group = "one") const {
    return group + " " + path_ + " " + name;
  }

  /// Another freeze in the place of the one before, whose files go.
  void freeze_anew(int version, const std::vector<std::string>& names) {
    serving_torch::Frozen made{"v" + std::to_string(version), {}};
    for (const std::string& name : names) {
      FreezeConfig config = config_of(folder_, kDim, FrozenDType::kFloat32);
      config.name = name;
      config.scratch_folder = path_ + "/" + made.token + "/" + name;
      std::filesystem::create_directories(config.scratch_folder);
      made.files[name] =
          freeze({{1, std::vector<float>(kDim, static_cast<float>(version))}}, config);
    }
    std::string before;
    {
      const std::lock_guard lock(paths().mutex);
      before = paths().frozen[path_].token;
      paths().frozen[path_] = made;
    }
    if (!before.empty()) std::filesystem::remove_all(path_ + "/" + before);
    token_ = made.token;
  }

  std::string file_of(const std::string& name) const {
    return path_ + "/" + token_ + "/" + name + "/0.frozen";
  }

  void before_reading(std::function<void()> call) {
    const std::lock_guard lock(paths().mutex);
    paths().before_reading[path_] = std::move(call);
  }

  int num_reads() const {
    const std::lock_guard lock(paths().mutex);
    return paths().num_reads[path_];
  }

  /// Whether files of this freeze are mapped.
  bool is_mapped(int version) const {
    std::ifstream maps("/proc/self/maps");
    const std::string text((std::istreambuf_iterator<char>(maps)),
                           std::istreambuf_iterator<char>());
    return text.find(path_ + "/v" + std::to_string(version) + "/") != std::string::npos;
  }

 private:
  TemporaryFolder folder_;
  std::string path_;
  std::string token_;
};

int version_of(const Table& table) {
  const Key key = 1;
  float row[kDim];
  serving_torch::check(recsdk_serving_lookup(table.get(), &key, 1, row, nullptr));
  return static_cast<int>(row[0]);
}

int read(const std::string& place) { return version_of(serving_torch::table_of(place, kDim)); }

std::string error_of(const std::string& place) {
  try {
    read(place);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

/// A door that threads wait at until it is opened.
class Door {
 public:
  ~Door() { open(); }
  void open() {
    if (!is_open_.exchange(true)) promise_.set_value();
  }
  void wait() {
    is_met_ = true;
    future_.wait();
  }
  void await_somebody() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!is_met_.load()) {
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("nobody came");
      std::this_thread::yield();
    }
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
  std::atomic<bool> is_open_{false};
  std::atomic<bool> is_met_{false};
};

TEST(TorchTablesTest, OpeningHoldsUpNobodyElse) {
  Checkpoint slow;
  Checkpoint fast;
  Checkpoint known;
  for (Checkpoint* const each : {&slow, &fast, &known}) each->freeze_anew(1, {"a", "b"});
  EXPECT_EQ(read(known.place("a")), 1);
  Door door;
  slow.before_reading([&] { door.wait(); });
  auto slow_one = std::async(std::launch::async, [&] { return read(slow.place("a")); });
  door.await_somebody();
  auto others = std::async(std::launch::async, [&] {
    const bool are_read = read(known.place("a")) == 1 && read(known.place("b")) == 1 &&
                          read(fast.place("b")) == 1 && read(fast.place("a", "two")) == 1;
    return are_read && recsdk_serving_torch_close(fast.path().c_str()) == 0 &&
           recsdk_serving_torch_use(fast.path().c_str(), "a", nullptr) == 0;
  });
  EXPECT_EQ(others.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  door.open();
  EXPECT_TRUE(others.get());
  EXPECT_EQ(slow_one.get(), 1);
}

TEST(TorchTablesTest, WhatManyThreadsAskForIsOpenedOnce) {
  Checkpoint checkpoint;
  checkpoint.freeze_anew(1, {"a", "b"});
  Door door;
  checkpoint.before_reading([&] { door.wait(); });
  std::vector<std::future<Table>> asked;
  for (int i = 0; i < 8; ++i) {
    asked.push_back(std::async(std::launch::async, [&, i] {
      return serving_torch::table_of(checkpoint.place(i % 2 == 0 ? "a" : "b"), kDim);
    }));
  }
  door.await_somebody();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the others come too
  door.open();
  std::vector<Table> tables;
  for (auto& each : asked) tables.push_back(each.get());
  for (std::size_t i = 2; i < tables.size(); ++i) EXPECT_EQ(tables[i], tables[i % 2]);
  EXPECT_NE(tables[0], tables[1]);
  EXPECT_EQ(checkpoint.num_reads(), 1);
}

TEST(TorchTablesTest, AFreezeThatComesBetweenTwoTablesIsReadWhole) {
  Checkpoint checkpoint;
  checkpoint.freeze_anew(1, {"a", "b"});
  checkpoint.before_reading([&] {
    checkpoint.before_reading({});
    const std::filesystem::path first = checkpoint.path() + "/v1/a";
    const std::filesystem::path kept = checkpoint.path() + "/kept";
    std::filesystem::rename(first, kept);  // the files of "b" go before those of "a"
    checkpoint.freeze_anew(2, {"a", "b"});
    std::filesystem::create_directories(first.parent_path());
    std::filesystem::rename(kept, first);
  });
  EXPECT_EQ(read(checkpoint.place("a")), 2);
  EXPECT_EQ(read(checkpoint.place("b")), 2);
}

TEST(TorchTablesTest, WhatIsClosedIsLetGoOfAndOpenedAnew) {
  Checkpoint checkpoint;
  Checkpoint other;
  checkpoint.freeze_anew(1, {"a", "b"});
  other.freeze_anew(5, {"a"});
  EXPECT_EQ(read(checkpoint.place("a")), 1);
  EXPECT_EQ(read(other.place("a")), 5);
  checkpoint.freeze_anew(2, {"a", "b"});
  EXPECT_EQ(read(checkpoint.place("b")), 1);
  EXPECT_EQ(recsdk_serving_torch_close(nullptr), RECSDK_SERVING_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recsdk_serving_torch_close("/elsewhere"), RECSDK_SERVING_OK);
  EXPECT_TRUE(checkpoint.is_mapped(1));
  Table held = serving_torch::table_of(checkpoint.place("a"), kDim);
  EXPECT_EQ(recsdk_serving_torch_close(checkpoint.path().c_str()), RECSDK_SERVING_OK);
  EXPECT_TRUE(checkpoint.is_mapped(1));  // by a call that runs
  EXPECT_EQ(version_of(held), 1);
  held.reset();
  EXPECT_FALSE(checkpoint.is_mapped(1));
  EXPECT_TRUE(other.is_mapped(5));
  EXPECT_EQ(read(checkpoint.place("b")), 2);
  EXPECT_EQ(read(other.place("a")), 5);
  EXPECT_EQ(other.num_reads(), 1);
}

TEST(TorchTablesTest, ACallThatRunsAcrossAChangeEndsAsItBegan) {
  Checkpoint checkpoint;
  const auto begin_read = [&](Door& door) {
    checkpoint.before_reading([&] { door.wait(); });
    auto reading = std::async(std::launch::async, [&] { return read(checkpoint.place("a")); });
    door.await_somebody();
    checkpoint.before_reading({});
    return reading;
  };
  checkpoint.freeze_anew(1, {"a"});
  Checkpoint given;
  given.freeze_anew(9, {"a"});
  const Table own = serving_torch::table_of(given.place("a"), kDim);
  Door closed;
  auto across_close = begin_read(closed);
  EXPECT_EQ(recsdk_serving_torch_close(checkpoint.path().c_str()), RECSDK_SERVING_OK);
  EXPECT_EQ(read(checkpoint.place("a")), 1);  // does not wait for the one that was closed
  EXPECT_EQ(recsdk_serving_torch_close(checkpoint.path().c_str()), RECSDK_SERVING_OK);
  closed.open();
  EXPECT_EQ(across_close.get(), 1);
  checkpoint.freeze_anew(2, {"a"});
  EXPECT_EQ(read(checkpoint.place("a")), 2);  // what that call opened is not kept
  EXPECT_EQ(recsdk_serving_torch_close(checkpoint.path().c_str()), RECSDK_SERVING_OK);
  Door replaced;
  auto across_use = begin_read(replaced);
  EXPECT_EQ(recsdk_serving_torch_use(checkpoint.path().c_str(), "a", own.get()), RECSDK_SERVING_OK);
  EXPECT_EQ(read(checkpoint.place("a")), 9);
  replaced.open();
  EXPECT_EQ(across_use.get(), 2);
  EXPECT_EQ(read(checkpoint.place("a")), 9);
  EXPECT_EQ(recsdk_serving_torch_use(checkpoint.path().c_str(), "a", nullptr), RECSDK_SERVING_OK);
  EXPECT_EQ(read(checkpoint.place("a")), 2);
}

/// What groups of places have read so far, in the plainest code.
class Model {
 public:
  void freeze_anew(int version) {
    current_ = version;
    missing_.clear();
  }
  void lose(const std::string& name) { missing_[name] = true; }
  void mend(const std::string& name) { missing_.erase(name); }
  void use(const std::string& name, std::optional<int> version) {
    given_.erase(name);
    if (version) given_[name] = *version;
  }
  void close() { opened_.clear(); }

  /// Which version a place reads; none: it is refused.
  std::optional<int> read(const std::string& group, const std::string& name) {
    if (given_.contains(name)) return given_[name];
    const bool is_here = !missing_.contains(name);
    if (!opened_.contains(group)) {
      if (!is_here) return std::nullopt;
      for (const char* const each : {"a", "b", "c"}) {
        if (!missing_.contains(each)) opened_[group].second[each] = true;
      }
      opened_[group].first = current_;
    }
    auto& [version, tables] = opened_[group];
    if (!tables.contains(name)) {
      if (version != current_ || !is_here) return std::nullopt;
      tables[name] = true;
    }
    return version;
  }

 private:
  int current_ = 0;
  std::map<std::string, bool> missing_;
  std::map<std::string, int> given_;
  std::map<std::string, std::pair<int, std::map<std::string, bool>>> opened_;
};

TEST(TorchTablesTest, RandomProgramsReadWhatTheModelReads) {
  constexpr const char* kNames[] = {"a", "b", "c"};
  Checkpoint given;
  given.freeze_anew(1000, {"a"});
  const Table own = serving_torch::table_of(given.place("a"), kDim);
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    Checkpoint checkpoint;
    Model model;
    int version = 1;
    checkpoint.freeze_anew(version, {"a", "b", "c"});
    model.freeze_anew(version);
    std::map<std::string, std::vector<std::byte>> lost;
    for (int i = 0; i < 60; ++i) {
      const std::string name = kNames[random() % 3];
      const std::string file = checkpoint.file_of(name);
      switch (random() % 12) {
        case 0:
          checkpoint.freeze_anew(++version, {"a", "b", "c"});
          model.freeze_anew(version);
          lost.clear();
          break;
        case 1:
          recsdk_serving_torch_close(checkpoint.path().c_str());
          model.close();
          break;
        case 2: {
          const bool gives = random() % 2 == 0;
          recsdk_serving_torch_use(checkpoint.path().c_str(), name.c_str(),
                                   gives ? own.get() : nullptr);
          model.use(name, gives ? std::optional<int>(1000) : std::nullopt);
          break;
        }
        case 3:
          if (lost.contains(name)) break;
          lost[name] = content_of(file);
          std::filesystem::remove(file);
          model.lose(name);
          break;
        case 4:
          if (!lost.contains(name)) break;
          put_content(file, lost[name]);
          lost.erase(name);
          model.mend(name);
          break;
        default: {
          const std::string group = random() % 2 == 0 ? "one" : "two";
          const std::string place = checkpoint.place(name, group);
          const std::optional<int> wanted = model.read(group, name);
          if (wanted) {
            ASSERT_EQ(read(place), *wanted);
          } else {
            ASSERT_NE(error_of(place), "");
          }
        }
      }
    }
    for (const char* const name : kNames)
      recsdk_serving_torch_use(checkpoint.path().c_str(), name, nullptr);
  }
}

TEST(TorchTablesTest, AThreadNeverReadsAnOlderFreezeThanBefore) {
  constexpr const char* kNames[] = {"a", "b", "c"};
  constexpr int kGiven = 1000;
  Checkpoint given;
  given.freeze_anew(kGiven, {"a"});
  const Table own = serving_torch::table_of(given.place("a"), kDim);
  Checkpoint checkpoint;
  checkpoint.freeze_anew(1, {"a", "b", "c"});
  std::atomic<bool> is_over{false};
  const auto read_all = [&](std::uint32_t seed) {
    std::mt19937 random(seed);
    std::map<std::string, int> last;
    do {
      const std::string group = random() % 2 == 0 ? "one" : "two";
      const int version = read(checkpoint.place(kNames[random() % 3], group));
      EXPECT_GE(version, last[group]);
      if (version != kGiven) last[group] = version;
    } while (!is_over.load());
  };
  const auto change = [&] {
    const std::string& path = checkpoint.path();
    for (int i = 0; !is_over.load(); ++i) {
      recsdk_serving_torch_use(path.c_str(), "a", i % 3 == 0 ? own.get() : nullptr);
      recsdk_serving_torch_close(path.c_str());
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  };
  std::vector<std::future<void>> readers;
  for (std::uint32_t seed = 0; seed < 3; ++seed)
    readers.push_back(std::async(std::launch::async, read_all, seed));
  auto changer = std::async(std::launch::async, change);
  for (int version = 2; version < 30; ++version) {
    checkpoint.freeze_anew(version, {"a", "b", "c"});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  is_over = true;
  for (auto& each : readers) each.get();
  changer.get();
  recsdk_serving_torch_use(checkpoint.path().c_str(), "a", nullptr);
}

/// Calls `call` with each of its allocations failing once, and `check` after each.
template <class Call, class Check>
void fail_each(const Call& call, const Check& check) {
  bool is_failing = true;
  for (std::int64_t n = 0; is_failing; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    allocations_left.store(n);
    try {
      call();
    } catch (const std::bad_alloc&) {
    } catch (const std::runtime_error& error) {  // what was out of memory within a call of C
      EXPECT_STREQ(error.what(), "out of memory; free some");
    }
    is_failing = allocations_left.exchange(-1) < 0;
    check();
  }
}

TEST(TorchTablesTest, ACallThatRunsOutOfMemoryChangesNothing) {
  Checkpoint given;
  given.freeze_anew(9, {"a"});
  const Table own = serving_torch::table_of(given.place("a"), kDim);
  Checkpoint checkpoint;
  checkpoint.freeze_anew(1, {"a", "b"});
  const std::string place = checkpoint.place("a");
  const std::string path = checkpoint.path();
  int status = RECSDK_SERVING_OK;
  const auto close = [&] { status = recsdk_serving_torch_close(path.c_str()); };
  const auto use = [&](const recsdk_serving_table* table) {
    status = recsdk_serving_torch_use(path.c_str(), "a", table);
  };
  const auto is_done = [&] {
    EXPECT_TRUE(status == RECSDK_SERVING_OK || status == RECSDK_SERVING_ERROR_OUT_OF_MEMORY);
    return status == RECSDK_SERVING_OK;
  };
  fail_each([&] { read(place); },
            [&] {
              close();
              EXPECT_FALSE(checkpoint.is_mapped(1));
              EXPECT_EQ(read(place), 1);
              close();
            });
  read(place);
  fail_each([&] { use(own.get()); },
            [&] {
              EXPECT_EQ(read(place), is_done() ? 9 : 1);
              use(nullptr);
            });
  use(own.get());
  fail_each([&] { use(nullptr); },
            [&] {
              EXPECT_EQ(read(place), is_done() ? 1 : 9);
              use(own.get());
            });
  use(nullptr);
  fail_each(close, [&] {
    EXPECT_EQ(checkpoint.is_mapped(1), !is_done());
    EXPECT_EQ(read(place), 1);
  });
}

}  // namespace
}  // namespace recsdk::test::torch_tables_test
