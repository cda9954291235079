// An index without a table: against a plain model, with makers of rows that fail, and what it tells
// of changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "recsdk/recsdk.h"

namespace recsdk::index_test {
namespace {

using Outcomes = std::vector<Outcome>;
constexpr Outcome kFound = Outcome::kFound;
constexpr Outcome kInserted = Outcome::kInserted;
constexpr Outcome kMissing = Outcome::kMissing;
constexpr Outcome kRefused = Outcome::kRefused;

struct Mapped {
  std::vector<RowNumber> rows;
  Outcomes outcomes;
};

Mapped map(Index& index, const std::vector<Key>& keys, bool insert, const Lease* lease = nullptr) {
  Mapped mapped{std::vector<RowNumber>(keys.size()), Outcomes(keys.size())};
  index.map(keys, mapped.rows, mapped.outcomes, {insert, lease});
  return mapped;
}

std::vector<Key> to_vector(std::span<const Key> keys) { return {keys.begin(), keys.end()}; }

/// Rows of its own: the key that each was made for.
class KeptKeys : public RowMaker {
 public:
  void prepare(RowNumber end, std::span<const std::uint32_t> reused) override {
    if (fails_to_prepare) throw std::runtime_error("no room");
    if (static_cast<std::size_t>(end) > keys.size()) keys.resize(static_cast<std::size_t>(end));
    announced.assign(reused.begin(), reused.end());
  }
  void make(const NewRows& added) override {
    std::vector<Key> new_keys(added.rows().size());
    added.copy_keys(0, new_keys);
    for (std::size_t i = 0; i < new_keys.size(); ++i) {
      if (new_keys[i] == fails_at) throw std::runtime_error("cannot make this one");
      keys.at(added.rows()[i]) = new_keys[i];
    }
    ++num_calls;
  }

  std::vector<Key> keys;
  std::vector<std::uint32_t> announced;
  std::optional<Key> fails_at;
  bool fails_to_prepare = false;
  int num_calls = 0;
};

TEST(Index, GivesRowsInInputOrder) {
  Index index({.name = "users"});
  const Mapped mapped = map(index, {7, -1, 7, 0}, true);
  EXPECT_EQ(mapped.outcomes, (Outcomes{kInserted, kInserted, kFound, kInserted}));
  EXPECT_EQ(mapped.rows, (std::vector<RowNumber>{0, 1, 0, 2}));
  EXPECT_EQ(map(index, {-1, 5}, false).outcomes, (Outcomes{kFound, kMissing}));
  EXPECT_EQ(index.size(), 3);
  EXPECT_EQ(index.end_row(), 3);
  index.check_invariants();
}

TEST(Index, BadConfigsAreRefusedByName) {
  EXPECT_THROW(Index({.name = ""}), std::invalid_argument);
  EXPECT_THROW(Index({.max_rows = -1}), std::invalid_argument);
  EXPECT_THROW(Index({.on_full = static_cast<OnFull>(7)}), std::invalid_argument);
  EXPECT_THROW(Index({.num_threads = 0}), std::invalid_argument);
}

TEST(Index, BadGroupsAreRefusedByName) {
  EXPECT_THROW(Index({.eviction_groups = 1}), std::invalid_argument);
  EXPECT_THROW(Index({.owned_groups = GroupRange{0, 1}}), std::invalid_argument);
  for (const std::int64_t groups : {-2, 0, 3, 16, 131'072})
    EXPECT_THROW(Index({.max_rows = 15, .eviction_groups = groups}), std::invalid_argument);
  for (const GroupRange owned : {GroupRange{-1, 1}, GroupRange{2, 1}, GroupRange{0, 5}}) {
    EXPECT_THROW(Index({.max_rows = 15, .eviction_groups = 4, .owned_groups = owned}),
                 std::invalid_argument);
  }
}

TEST(Index, AFullOneRefusesOrRaises) {
  // By the fixed hash key 3 is the lowest of the three.
  const Outcomes expected = {kInserted, kRefused, kInserted, kFound, kRefused};
  Index refusing({.max_rows = 2});
  EXPECT_EQ(map(refusing, {1, 3, 2, 1, 3}, true).outcomes, expected);
  Index raising({.max_rows = 2, .on_full = OnFull::kRaise});
  EXPECT_THROW(map(raising, {1, 2, 3}, true), Error);
  EXPECT_EQ(raising.size(), 0);
  raising.check_invariants();
}

TEST(Index, ItsHomeMakesNewRowsOnly) {
  const auto maker = std::make_shared<KeptKeys>();
  Index index({}, maker);
  const Mapped first = map(index, {10, 20}, true);
  const Mapped second = map(index, {20, 30, 30}, true);
  EXPECT_EQ(maker->num_calls, 2);
  for (const Mapped* mapped : {&first, &second}) {
    for (std::size_t i = 0; i < mapped->rows.size(); ++i)
      EXPECT_EQ(maker->keys.at(static_cast<std::size_t>(mapped->rows[i])),
                mapped == &first ? (i == 0 ? 10 : 20) : (i == 0 ? 20 : 30));
  }
  map(index, {10, 20}, true);
  map(index, {99}, false);
  EXPECT_EQ(maker->num_calls, 2);
}

TEST(Index, WhatItsHomeThrowsTakesTheInsertionBack) {
  const auto maker = std::make_shared<KeptKeys>();
  Index index({}, maker);
  map(index, {1, 2, 3}, true);
  index.erase(std::vector<Key>{2});
  maker->fails_at = 6;
  EXPECT_THROW(map(index, {4, 5, 6, 7}, true), std::runtime_error);
  maker->fails_at.reset();
  maker->fails_to_prepare = true;
  EXPECT_THROW(map(index, {8}, true), std::runtime_error);
  maker->fails_to_prepare = false;
  index.check_invariants();
  EXPECT_EQ(index.size(), 2);
  const Mapped again = map(index, {4, 5}, true);
  EXPECT_EQ(again.rows, (std::vector<RowNumber>{1, 3}));
  EXPECT_EQ(maker->announced, (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(index.stats().outcomes[static_cast<int>(kInserted)], 5U);
}

TEST(Index, ItsHomeMustNotCallIt) {
  struct Calling : RowMaker {
    void make(const NewRows&) override { index->size(); }
    Index* index = nullptr;
  };
  const auto maker = std::make_shared<Calling>();
  Index index({}, maker);
  maker->index = &index;
  EXPECT_THROW(map(index, {1}, true), Error);
  EXPECT_EQ(index.size(), 0);
}

TEST(Index, AHomeThatReleasesALeaseHearsOfTheRowsThatAreUsedAgainByTheNextCall) {
  struct Releasing : KeptKeys {
    void prepare(RowNumber end, std::span<const std::uint32_t> reused) override {
      if (lease) lease->release();
      KeptKeys::prepare(end, reused);
    }
    std::optional<Lease> lease;
  };
  const auto maker = std::make_shared<Releasing>();
  Index index({}, maker);
  map(index, {1, 2}, true);
  map(index, {1, 2, 1}, true);  // few are new: rows used before are used again
  maker->lease = index.lease();
  index.erase(std::vector<Key>{1});
  EXPECT_EQ(map(index, {2, 2, 3}, true).rows[2], 2);
  EXPECT_EQ(maker->announced, std::vector<std::uint32_t>());
  EXPECT_EQ(map(index, {2, 2, 4}, true).rows[2], 0);
  EXPECT_EQ(maker->announced, (std::vector<std::uint32_t>{0}));
  index.check_invariants();
}

TEST(Index, ALeaseOutlivesIt) {
  std::optional<Lease> lease;
  {
    Index index({}, std::make_shared<KeptKeys>());
    lease = index.lease(3);
    map(index, {1}, true, &*lease);
  }
  EXPECT_EQ(lease->step(), 3);
  lease->release();
}

TEST(Index, ATableIsAnIndexWithRows) {
  TableConfig config;
  config.dim = 2;
  config.name = "items";
  Table table(config);
  const Mapped mapped = map(table.index(), {5, 6}, true);
  std::vector<float> values(4, 9.0F);
  Outcomes outcomes(2);
  table.lookup(std::vector<Key>{5, 6}, values.data(), outcomes);
  EXPECT_EQ(outcomes, (Outcomes{kFound, kFound}));
  EXPECT_EQ(values, std::vector<float>(4, 0.0F));
  table.index().erase(std::vector<Key>{5});
  EXPECT_EQ(table.size(), 1);
  EXPECT_THROW(table.index().assign({}), std::invalid_argument);
  table.index().check_idle();
  EXPECT_THROW(static_cast<void>(table.index().cut()), std::invalid_argument);
  table.check_invariants();
}

// ---- changes -----------------------------------------------------------------------------------

TEST(IndexCut, NamesWhatCameAndLeft) {
  Index index({});
  map(index, {1, 2, 3}, true);
  {
    IndexCut all = index.cut();
    EXPECT_EQ(to_vector(all.keys()), (std::vector<Key>{1, 2, 3}));
    EXPECT_FALSE(all.changes_only());
    EXPECT_THROW(static_cast<void>(index.cut()), Error);  // one is open
    EXPECT_THROW(index.assign({}), Error);
    all.finish(true);
  }
  const Mapped fourth = map(index, {4}, true);
  index.erase(std::vector<Key>{1, 2, 77});
  map(index, {2}, true);
  index.note_changed(std::vector<RowNumber>{2});  // that of key 3
  IndexCut changes = index.cut(true);
  std::vector<Key> came = to_vector(changes.keys());
  std::sort(came.begin(), came.end());
  EXPECT_EQ(came, (std::vector<Key>{2, 3, 4}));
  EXPECT_EQ(to_vector(changes.left()), (std::vector<Key>{1}));
  ASSERT_EQ(changes.causes().size(), 1U);
  EXPECT_EQ(changes.causes()[0], LeaveCause::kErased);
  for (std::size_t i = 0; i < changes.keys().size(); ++i)
    EXPECT_EQ(map(index, {changes.keys()[i]}, false).rows[0], changes.rows()[i]);
}

TEST(IndexCut, AnAbandonedOneIsAsIfItHadNeverBeen) {
  Index index({});
  index.cut().finish(true);
  map(index, {1, 2}, true);
  {
    const IndexCut abandoned = index.cut(true);
  }
  index.erase(std::vector<Key>{2});
  map(index, {3}, true);
  const IndexCut changes = index.cut(true);
  EXPECT_EQ(to_vector(changes.keys()), (std::vector<Key>{1, 3}));
  EXPECT_EQ(to_vector(changes.left()), (std::vector<Key>{2}));
}

TEST(IndexCut, NeedsOneToBuildOn) {
  Index index({});
  EXPECT_FALSE(index.is_tracking());
  EXPECT_THROW(static_cast<void>(index.cut(true)), std::invalid_argument);
  {
    const IndexCut abandoned = index.cut();
  }
  EXPECT_FALSE(index.is_tracking());
  index.cut().finish(true);
  EXPECT_TRUE(index.is_tracking());
  EXPECT_EQ(index.cut(true).keys().size(), 0U);
}

TEST(IndexCut, KeysInFlightAreNotInIt) {
  Index index({});
  index.cut().finish(true);
  Lease lease = index.lease(1);
  map(index, {1}, true, &lease);
  {
    IndexCut before = index.cut(true);
    EXPECT_EQ(before.keys().size(), 0U);
    lease.release();
    before.finish(true);
  }
  EXPECT_EQ(to_vector(index.cut(true).keys()), (std::vector<Key>{1}));
}

TEST(Index, NoteChangedChecksRows) {
  Index index({});
  map(index, {1}, true);
  index.note_changed({});
  EXPECT_THROW(index.note_changed(std::vector<RowNumber>{0, 1}), std::invalid_argument);
  EXPECT_THROW(index.note_changed(std::vector<RowNumber>{-1}), std::invalid_argument);
}

// ---- other keys --------------------------------------------------------------------------------

TEST(Index, AssignReplacesAllKeysOrNone) {
  const auto maker = std::make_shared<KeptKeys>();
  Index index({.max_rows = 3}, maker);
  map(index, {1, 2}, true);
  EXPECT_THROW(index.assign(std::vector<Key>{5, 6, 5}), std::invalid_argument);
  EXPECT_THROW(index.assign(std::vector<Key>{5, 6, 7, 8}), Error);
  {
    const Lease lease = index.lease();
    EXPECT_THROW(index.assign(std::vector<Key>{5}), Error);
    EXPECT_THROW(index.check_idle(), Error);
  }
  maker->fails_to_prepare = true;
  EXPECT_THROW(index.assign(std::vector<Key>{5}), std::runtime_error);
  maker->fails_to_prepare = false;
  EXPECT_EQ(map(index, {1, 2, 5}, false).outcomes, (Outcomes{kFound, kFound, kMissing}));
  index.assign(std::vector<Key>{9, -9, 0});
  EXPECT_EQ(map(index, {9, -9, 0, 1}, false).rows[2], 2);
  EXPECT_EQ(maker->num_calls, 1);
  EXPECT_EQ(maker->keys.size(), 3U);
  EXPECT_EQ(index.cut(true).keys().size(), 0U);  // changes count from here on
  index.check_invariants();
}

TEST(Index, ExportGoesOnWhereItEnded) {
  Index index({});
  std::vector<Key> wanted(100);
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<Key>(i) * 7 - 50;
  map(index, wanted, true);
  index.erase(std::vector<Key>{wanted[3], wanted[50]});
  std::vector<Key> keys(7);
  std::vector<RowNumber> rows(7);
  std::vector<Key> all;
  RowNumber begin = 0;
  for (std::int64_t n = 7; n == 7;) {
    n = index.export_keys(begin, keys, rows);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      EXPECT_EQ(wanted[static_cast<std::size_t>(rows[i])], keys[i]);
      all.push_back(keys[i]);
    }
  }
  EXPECT_EQ(all.size(), 98U);
  EXPECT_THROW(index.export_keys(begin, {}, {}), std::invalid_argument);
}

TEST(Index, ManyAreMappedAtOnce) {
  Index first({.name = "first"});
  Index second({.name = "second"});
  const std::vector<Key> keys = {1, 2, 1};
  std::vector<RowNumber> rows(6);
  Outcomes outcomes(6);
  const auto part = [&](Index& index, std::size_t begin) {
    return IndexMapCall{&index,
                        keys,
                        std::span(rows).subspan(begin, 3),
                        std::span(outcomes).subspan(begin, 3),
                        {.insert = true}};
  };
  const std::vector<IndexMapCall> calls = {part(first, 0), part(second, 3)};
  map_indexes(calls);
  EXPECT_EQ(outcomes, (Outcomes{kInserted, kInserted, kFound, kInserted, kInserted, kFound}));
  EXPECT_THROW(map_indexes(std::vector<IndexMapCall>{calls[0], calls[0]}), std::invalid_argument);
  EXPECT_THROW(map_indexes(std::vector<IndexMapCall>(1)), std::invalid_argument);
}

TEST(Index, KeysThatLieInPiecesAreMappedAsOne) {
  Index index({.name = "index"});
  const std::vector<Key> keys = {7, 1, 2, 9, 1};
  const std::vector<std::span<const Key>> pieces = {
      std::span(keys).subspan(1, 2), {}, std::span(keys).last(1)};
  std::vector<RowNumber> rows(3);
  Outcomes outcomes(3);
  IndexMapCall call{&index, {}, rows, outcomes, {.insert = true}, pieces};
  map_indexes({&call, 1});
  EXPECT_EQ(outcomes, (Outcomes{kInserted, kInserted, kFound}));
  EXPECT_EQ(rows, (std::vector<RowNumber>{0, 1, 0}));
  EXPECT_EQ(index.size(), 2);
  call.keys = keys;
  EXPECT_THROW(map_indexes({&call, 1}), std::invalid_argument);
  call.keys = {};
  call.rows = std::span(rows).first(2);
  EXPECT_THROW(map_indexes({&call, 1}), std::invalid_argument);
}

TEST(Index, NumbersOfAStoreGoWhereTheyAreWanted) {
  Index index({.name = "index"});
  const std::vector<Key> keys = {7, 1, 7};
  std::vector<std::int32_t> numbers(5, -1);
  Outcomes outcomes(3);
  const std::vector<NumberedKeys> parts = {{3, 2}, {0, 1}};
  StoreNumbers store{numbers, {}, parts, {.first_row = 10, .default_row = 99, .num_shared = 0}};
  IndexMapCall call{&index, keys, {}, outcomes, {.insert = true}, {}, &store};
  map_indexes({&call, 1});
  EXPECT_EQ(numbers, (std::vector<std::int32_t>{10, -1, -1, 10, 11}));
  const std::vector<Key> missing = {1, 5, 7};
  call.keys = missing;
  call.options = {};
  map_indexes({&call, 1});
  EXPECT_EQ(numbers, (std::vector<std::int32_t>{10, -1, -1, 11, 99}));
  std::vector<RowNumber> rows(3);
  call.rows = rows;
  EXPECT_THROW(map_indexes({&call, 1}), std::invalid_argument);  // rows and a store
  call.rows = {};
  std::vector<std::int64_t> wide(5);
  store.wide = wide;
  EXPECT_THROW(map_indexes({&call, 1}), std::invalid_argument);  // both widths
  store.narrow = {};
  store.place.first_row = std::int64_t{1} << 40;
  map_indexes({&call, 1});
  EXPECT_EQ(wide[3], store.place.first_row + 1);
  const std::vector<NumberedKeys> too_few = {{0, 2}};
  store.parts = too_few;
  EXPECT_THROW(map_indexes({&call, 1}), std::invalid_argument);
}

// ---- a model -----------------------------------------------------------------------------------

/// An index in the plainest code, with what changed since its last durable cut.
struct Model {
  std::set<Key> keys;
  std::set<Key> came;
  std::set<Key> left;

  void insert(Key key) {
    if (!keys.insert(key).second) return;
    came.insert(key);
    left.erase(key);
  }
  void erase(Key key) {
    if (keys.erase(key) == 0) return;
    came.erase(key);
    left.insert(key);
  }
  void forget_changes() {
    came.clear();
    left.clear();
  }
};

std::set<Key> to_set(std::span<const Key> keys) { return {keys.begin(), keys.end()}; }

class Replay {
 public:
  explicit Replay(std::uint32_t seed)
      : random_(seed), index_({.hash_seed = seed, .num_threads = 1 + static_cast<int>(seed % 2)}) {
    index_.cut().finish(true);
  }

  void run() {
    for (int i = 0; i < 60; ++i) {
      step();
      ASSERT_EQ(index_.size(), static_cast<std::int64_t>(model_.keys.size()));
    }
    index_.check_invariants();
  }

 private:
  std::vector<Key> draw() {
    std::vector<Key> keys(random_() % 40);
    for (Key& key : keys) key = static_cast<Key>(random_() % 90) * 0x0123456789ABCDEF;
    return keys;
  }

  void step() {
    switch (random_() % 6) {
      case 0:
      case 1: {
        const std::vector<Key> keys = draw();
        map(index_, keys, true);
        for (const Key key : keys) model_.insert(key);
        return;
      }
      case 2: {
        const std::vector<Key> keys = draw();
        index_.erase(keys);
        for (const Key key : keys) model_.erase(key);
        return;
      }
      case 3: {  // a batch ahead: readers see it once it is released
        Lease lease = index_.lease(next_step_++);
        const std::vector<Key> keys = draw();
        map(index_, keys, true, &lease);
        EXPECT_EQ(index_.size(), static_cast<std::int64_t>(model_.keys.size()));
        lease.release();
        for (const Key key : keys) model_.insert(key);
        return;
      }
      case 4: {
        if (random_() % 4 != 0) return;
        index_.clear();
        for (const Key key : std::set<Key>(model_.keys)) model_.erase(key);
        return;
      }
      default:
        return cut();
    }
  }

  void cut() {
    const bool changes_only = random_() % 2 == 0;
    const bool durable = random_() % 2 == 0;
    IndexCut cut = index_.cut(changes_only);
    EXPECT_EQ(to_set(cut.keys()), changes_only ? model_.came : model_.keys);
    // A key that came and left again between two cuts may be named too.
    for (const Key key : model_.left)
      EXPECT_EQ(to_set(cut.left()).count(key), changes_only ? 1U : 0U);
    for (const Key key : cut.left()) EXPECT_EQ(model_.keys.count(key), 0U);
    const std::vector<Key> keys = draw();  // beside the open cut
    if (durable) model_.forget_changes();
    map(index_, keys, true);
    for (const Key key : keys) model_.insert(key);
    cut.finish(durable);
  }

  std::mt19937 random_;
  Index index_;
  Model model_;
  std::int64_t next_step_ = 0;
};

TEST(Index, EverySequenceOfCallsEndsAsTheModelSays) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    Replay(seed).run();
    if (testing::Test::HasFailure()) return;
  }
}

// ---- initial rows ------------------------------------------------------------------------------

TEST(InitialWeights, AreThoseOfATable) {
  TableConfig config;
  config.dim = 5;
  config.name = "items";
  config.seed = 3;
  config.initializer = InitializerConfig::normal(0.0F, 2.0F);
  Table table(config);
  const std::vector<Key> keys = {4, -4, 0};
  std::vector<float> wanted(15);
  table.find_or_insert(keys, wanted.data());
  std::vector<float> got(15);
  initial_weights(config.initializer, 3, table_hash("items"), 5, keys, got.data());
  EXPECT_EQ(got, wanted);
  EXPECT_THROW(initial_weights(config.initializer, 3, 1, 0, keys, got.data()),
               std::invalid_argument);
}

}  // namespace
}  // namespace recsdk::index_test
