// Every allocation of every call of a device table fails once: the table is as it was, and the same
// call then succeeds.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "failing_allocations.h"
#include "failing_operator_new.h"
#include "recsdk/device_table.h"
#include "recsdk/runtime.h"
#include "util/memory.h"

namespace recsdk::test::device_allocation_test {
namespace {

constexpr std::size_t kKeys = 300;
constexpr std::size_t kDim = 3;

std::vector<Key> range(Key first, std::size_t count) {
  std::vector<Key> keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

/// Everything that a failed call must leave as it was.
struct Content {
  explicit Content(const DeviceTable& table)
      : keys(static_cast<std::size_t>(table.size()) + 1),
        weights(keys.size() * kDim),
        state(keys.size() * static_cast<std::size_t>(table.layout().state_width())) {
    table.check_invariants();
    RowNumber begin = 0;
    table.export_rows(begin, {std::ssize(keys), keys.data(), weights.data(), state.data()});
    const DeviceTableStats stats = table.stats();
    counters.assign(std::begin(stats.outcomes), std::end(stats.outcomes));
    counters.insert(counters.end(), {static_cast<std::uint64_t>(stats.num_rows),
                                     static_cast<std::uint64_t>(stats.num_rows_in_flight),
                                     stats.erased, stats.updates});
  }
  bool operator==(const Content&) const = default;

  std::vector<Key> keys;
  std::vector<float> weights;
  std::vector<float> state;
  std::vector<std::uint64_t> counters;
};

/// A device table in the middle of its life, and a batch of it.
struct Subject {
  explicit Subject(const OptimizerConfig& optimizer)
      : table(config(optimizer), {.backend = "cpu", .device = 0, .max_device_rows = 1000}) {
    map(range(0, kKeys));
    table.erase(range(40, 30));
    map(range(0, kKeys / 2));
  }

  static TableConfig config(const OptimizerConfig& optimizer) {
    TableConfig config;
    config.dim = kDim;
    config.hash_seed = 5;
    config.optimizer = optimizer;
    config.initializer = InitializerConfig::uniform(-1.0F, 1.0F);
    return config;
  }
  void map(const std::vector<Key>& keys) {
    table.map(keys, std::span(rows).first(keys.size()), std::span(outcomes).first(keys.size()),
              {.insert = true, .lease = lease.step() ? &lease : nullptr});
  }

  DeviceTable table;
  Lease lease;
  std::vector<RowNumber> rows = std::vector<RowNumber>(kKeys);
  std::vector<Outcome> outcomes = std::vector<Outcome>(kKeys);
  std::vector<float> values = std::vector<float>(kKeys * kDim);
};
using Call = std::function<void(Subject&)>;

struct DeviceMemory {
  alignas(64) std::array<float, kKeys * kDim> floats;
};

/// Gradients and weights, some keys several times.
const DeviceMemory& given() {
  static const DeviceMemory memory = [] {
    DeviceMemory made;
    for (std::size_t i = 0; i < made.floats.size(); ++i)
      made.floats[i] = static_cast<float>(i % 17) - 8.0F;
    return made;
  }();
  return memory;
}

std::vector<Key> repeated() {
  std::vector<Key> keys = range(200, kKeys);
  for (std::size_t i = 0; i < keys.size(); i += 3) keys[i] = keys[0];
  return keys;
}

struct Named {
  std::string name;
  Call call;
};

std::vector<Named> calls() {
  const auto map_ahead = [](Subject& s) {
    if (!s.lease.step()) s.lease = s.table.lease(7);
    s.map(repeated());
  };
  const auto update = [](Subject& s) {
    s.table.update(std::span(s.rows).first(kKeys / 2), std::span(s.outcomes).first(kKeys / 2),
                   given().floats.data());
  };
  const auto gather = [](Subject& s) {
    static DeviceMemory out;
    s.table.gather(std::span(s.rows).first(kKeys / 2), std::span(s.outcomes).first(kKeys / 2),
                   out.floats.data());
  };
  return {{"map", [](Subject& s) { s.map(repeated()); }},
          {"map_ahead", map_ahead},
          {"find_or_insert",
           [](Subject& s) { s.table.find_or_insert(repeated(), s.values.data(), s.outcomes); }},
          {"upsert",
           [](Subject& s) {
             const std::vector<Key> keys = {5, 50, 400, 5, 401};
             s.table.upsert(keys, given().floats.data());
           }},
          {"apply_gradients",
           [](Subject& s) { s.table.apply_gradients(repeated(), given().floats.data()); }},
          {"update", update},
          {"gather", gather},
          {"lookup", [](Subject& s) { s.table.lookup(repeated(), s.values.data()); }},
          {"erase", [](Subject& s) { s.table.erase(range(-50, 200)); }},
          {"clear", [](Subject& s) { s.table.clear(); }}};
}

class DeviceAllocationTest : public testing::TestWithParam<OptimizerConfig> {
 protected:
  DeviceAllocationTest() { internal::set_page_allocation_hook(fail_pages); }
  ~DeviceAllocationTest() override {
    internal::set_page_allocation_hook(nullptr);
    set_num_threads(threads_before_);
  }

 private:
  int threads_before_ = num_threads();
};

TEST_P(DeviceAllocationTest, AFailureLeavesEverything) {
  for (const auto& [name, call] : calls()) {
    bool was_met = false;
    for (std::int64_t n = 0;; ++n) {
      SCOPED_TRACE(name + ", allocation " + std::to_string(n) + " fails");
      Subject subject(GetParam());
      Subject twin(GetParam());
      set_num_threads(2 + static_cast<int>(n % 2));  // a new pool: making it is part of the call
      const Content before(subject.table);
      const Ending ending = run_failing(n, [&] { call(subject); });
      if (ending == Ending::kOutOfMemory) {
        was_met = true;
        ASSERT_TRUE(Content(subject.table) == before);
        ASSERT_NO_THROW(call(subject));
      }
      call(twin);
      subject.lease.release();
      twin.lease.release();
      ASSERT_TRUE(Content(subject.table) == Content(twin.table));
      ASSERT_EQ(subject.values, twin.values);
      if (ending == Ending::kUndisturbed) break;
    }
    EXPECT_TRUE(was_met) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, DeviceAllocationTest,
                         testing::Values(OptimizerConfig::sgd(0.1F),
                                         OptimizerConfig::rowwise_adagrad(0.1F),
                                         OptimizerConfig::adam(0.1F)));

}  // namespace
}  // namespace recsdk::test::device_allocation_test
