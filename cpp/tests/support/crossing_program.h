// The calls that each combination of settings makes of its tables, and what they answer.
//
// Shape letters: N keys, D row width.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "crossing_settings.h"
#include "device_test_support.h"
#include "kernel_support.h"

namespace recsdk::test {

/// What calls of a table answered.
struct Transcript {
  std::vector<std::int64_t> words;  ///< outcomes, sizes and codes of errors
  std::vector<float> values;

  void note(std::span<const Outcome> outcomes) {
    for (const Outcome outcome : outcomes) words.push_back(static_cast<std::int64_t>(outcome));
  }
  void note(std::span<const float> floats) {
    values.insert(values.end(), floats.begin(), floats.end());
  }
  /// Makes a call, and notes what Error it threw; true if none.
  template <typename Call>
  bool succeeds(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      words.push_back(100 + static_cast<std::int64_t>(error.code()));
      return false;
    }
    return true;
  }
};

/// Extreme keys, common ones and some of them again, more than kFewRows of them different. The
/// first kFewRows / 2 fit into any table that is new.
inline std::vector<Key> crossing_keys(std::uint64_t seed) {
  using Limits = std::numeric_limits<Key>;
  std::vector<Key> keys = {0, Limits::min(),     Limits::max(), -1,
                           1, Limits::min() + 1, Key{1} << 32,  -(Key{1} << 32)};
  Noise noise(seed);
  for (Key key = 2; key < 500; ++key) keys.push_back(key);
  for (int i = 0; i < 500; ++i)
    keys.push_back(static_cast<Key>(noise.next() << 40U ^ noise.next() << 15U ^ noise.next()));
  for (std::size_t i = 0; i < 100; ++i) keys.push_back(keys[i * 9]);
  for (std::size_t i = keys.size() - 1; i > 0; --i)
    std::swap(keys[i], keys[static_cast<std::size_t>(noise.below(std::ssize(keys)))]);
  return keys;
}

/// The arguments of one round of calls.
struct Round {
  Round(std::int64_t width, std::uint64_t seed)
      : dim(width),
        step(static_cast<std::int64_t>(seed)),
        keys(crossing_keys(seed % 3)),
        first(keys.begin(), keys.begin() + kFewRows / 2),
        gradients(Noise(seed + 9).values(size() * dim)),
        bad(gradients),
        weights(Noise(seed + 8).values(size())) {
    for (float& weight : weights) weight = 1.25F + weight / 2.0F;
    bad[static_cast<std::size_t>(kBad * dim)] = std::numeric_limits<float>::quiet_NaN();
    bad[static_cast<std::size_t>(kWorse * dim + dim - 1)] = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < keys.size(); i += 6) gone.push_back(keys[i]);
    gone.push_back(INT64_MAX - 77);
    // More than one thread takes at a time.
    for (int i = 0; i < 9; ++i) many.insert(many.end(), keys.begin(), keys.end());
    many_gradients = Noise(seed + 7).values(std::ssize(many) * dim);
  }

  std::int64_t size() const { return std::ssize(keys); }
  std::size_t floats(std::size_t num_keys) const {
    return num_keys * static_cast<std::size_t>(dim);
  }
  float learning_rate() const { return step % 2 == 0 ? 0.02F : 0.03F; }

  static constexpr std::int64_t kBad = 3;
  static constexpr std::int64_t kWorse = 340;

  std::int64_t dim;
  std::int64_t step;
  std::vector<Key> keys;   // (N,)
  std::vector<Key> first;  // of the keys
  std::vector<Key> gone;
  std::vector<Key> many;
  std::vector<float> gradients;  // (N, D)
  std::vector<float> bad;        // (N, D)
  std::vector<float> weights;    // (N,)
  std::vector<float> many_gradients;
};

/// Keys that are mapped.
struct MappedKeys {
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
};

/// How many rows the bad gradients of a round fall on; keys without a row may share some.
inline std::uint64_t num_bad(const Round& round, const MappedKeys& mapped, DefaultKind otherwise) {
  std::set<std::pair<bool, std::int64_t>> bad;
  for (const std::int64_t place : {Round::kBad, Round::kWorse}) {
    const auto i = static_cast<std::size_t>(place);
    if (has_row(mapped.outcomes[i])) {
      bad.emplace(false, round.keys[i]);
    } else if (otherwise == DefaultKind::kSharedRows) {
      bad.emplace(true, mapped.rows[i]);
    }
  }
  return bad.size();
}

/// Trains a table by bags, then with gradients that are no numbers.
inline void train(Table& table, const Round& round, const MappedKeys& mapped, Transcript& said) {
  const std::int64_t n = round.size();
  const std::vector<std::int64_t> offsets = {0, 5, 5, 38, 39, n / 2, n};
  const std::size_t num_bags = offsets.size() - 1;
  const Bags mean{mapped.rows, mapped.outcomes, offsets, round.weights, Pooling::kMean};
  const Bags plain{mapped.rows, mapped.outcomes, {}, {}, Pooling::kSum};
  std::vector<float> pooled(round.floats(num_bags + round.keys.size()));
  const PoolBlock blocks[] = {{mean, pooled.data(), round.dim},
                              {plain, pooled.data() + round.floats(num_bags), round.dim}};
  table.pool(blocks);
  said.note(pooled);
  std::vector<float> weights_grad(round.weights.size());
  const GradBlock good[] = {{mean, round.gradients.data(), round.dim, weights_grad.data()},
                            {plain, round.gradients.data(), 0, nullptr}};
  table.update(good);
  said.note(weights_grad);
  const GradBlock bad[] = {{plain, round.bad.data(), round.dim, nullptr}};
  const std::uint64_t num = num_bad(round, mapped, table.config().default_row.kind);
  const bool raises = table.config().on_nonfinite == NonFinite::kRaise && num > 0;
  const TableStats before = table.stats();
  EXPECT_EQ(said.succeeds([&] { table.update(bad); }), !raises);
  EXPECT_EQ(table.stats().nonfinite - before.nonfinite, raises ? 0 : num);
  EXPECT_EQ(table.update_count() - before.updates, raises ? 0 : 1);
}

/// Trains a device table, with gradients that are no numbers last.
inline void train(DeviceTable& table, const Round& round, const MappedKeys& mapped,
                  Transcript& said) {
  const std::shared_ptr<internal::Device> device =
      internal::open_device(table.options().backend, table.options().device);
  const internal::CurrentDevice current(*device);
  Copies copies(*device);
  const internal::DeviceBuffer out = copies.up(std::vector<float>(round.gradients.size()));
  table.gather(mapped.rows, mapped.outcomes, out.as<float>());
  table.synchronize();
  said.note(copies.down(out.as<float>(), std::ssize(round.gradients)));
  const internal::DeviceBuffer good = copies.up(round.gradients);
  const internal::DeviceBuffer bad = copies.up(round.bad);
  table.update(mapped.rows, mapped.outcomes, good.as<float>());
  table.update(mapped.rows, mapped.outcomes, bad.as<float>());
  table.synchronize();
}

/// The same as a host's table does it, its peer.
struct Peer {
  Table& table;
};
inline void train(Peer peer, const Round& round, const MappedKeys& mapped, Transcript& said) {
  const Bags plain{mapped.rows, mapped.outcomes, {}, {}, Pooling::kSum};
  std::vector<float> pooled(round.gradients.size());
  const PoolBlock block{plain, pooled.data(), round.dim};
  peer.table.pool({&block, 1});
  said.note(pooled);
  for (const std::vector<float>* gradients : {&round.gradients, &round.bad}) {
    const GradBlock update{plain, gradients->data(), round.dim, nullptr};
    peer.table.update({&update, 1});
  }
}
inline Table& table_of(Peer peer) { return peer.table; }
template <typename AnyTable>
AnyTable& table_of(AnyTable& table) {
  return table;
}

template <typename AnyTable>
void note_lookup(const AnyTable& table, const Round& round, Transcript& said) {
  std::vector<float> values(round.gradients.size());
  std::vector<Outcome> outcomes(round.keys.size());
  table.lookup(round.keys, values.data(), outcomes);
  said.note(values);
  said.note(outcomes);
}

/// Inserts and trains as a batch with a step.
template <typename Side>
void train_a_batch(Side& side, const Round& round, Transcript& said) {
  auto& table = table_of(side);
  const Lease lease = table.lease(round.step);
  MappedKeys mapped{std::vector<RowNumber>(round.keys.size()),
                    std::vector<Outcome>(round.keys.size())};
  const auto map = [&](bool insert) {
    table.map(round.keys, mapped.rows, mapped.outcomes, {insert, &lease});
    said.note(mapped.outcomes);
  };
  if (!said.succeeds([&] { map(true); })) map(false);  // the table may be full
  note_lookup(table, round, said);
  train(side, round, mapped, said);
}

/// One round of calls of a table.
template <typename Side>
Transcript go_on(Side&& side, const Round& round) {
  auto& table = table_of(side);
  Transcript said;
  std::vector<float> values(round.gradients.size());
  std::vector<Outcome> outcomes(round.keys.size());
  table.set_learning_rate(round.learning_rate());
  for (const std::vector<Key>* keys : {&round.first, &round.keys}) {
    const std::span<Outcome> told(outcomes.data(), keys->size());
    if (said.succeeds([&] { table.find_or_insert(*keys, values.data(), told); })) said.note(told);
    said.note(values);
  }
  train_a_batch(side, round, said);
  table.apply_gradients(round.many, round.many_gradients.data());
  table.apply_gradients({}, nullptr);
  const std::span<Outcome> gone(outcomes.data(), round.gone.size());
  table.erase(round.gone, gone);
  said.note(gone);
  said.succeeds([&] { table.upsert({round.gone.data() + 1, 5}, round.gradients.data()); });
  said.succeeds([&] { table.find_or_insert(round.gone, values.data(), gone); });
  said.words.push_back(table.size());
  note_lookup(table, round, said);
  table.check_invariants();
  return said;
}

}  // namespace recsdk::test
