// Maps from 64-bit keys to row numbers: recsdk::Table::map beside std, Abseil and Boost,
// interleaved in one process.
//
//   maps_bench --workload uniform|dense|growth|flood --keys N [--dim D] [--reps R] [--seed S]
//
// Prints one JSON object per operation on a line of its own: the median and the quartiles of the
// rates of every contestant in the repetitions, which take turns. Every answer is compared with
// that of the others.
#include <functional>
#include <memory>
#include <unordered_map>

#include <absl/container/flat_hash_map.h>
#include <boost/unordered/unordered_flat_map.hpp>

#include "harness.h"
#include "util/hash.h"  // to choose keys that collide; nothing that is timed calls it

namespace recsdk::bench {
namespace {

constexpr RowNumber kNone = -1;

// What a call gives: a row number for each key, which has none where the outcome says so.
struct Answer {
  explicit Answer(std::size_t size) : rows(size), outcomes(size) {}
  /// Row numbers as every contestant would say them. Not part of what is timed.
  std::vector<RowNumber> normal() const {
    std::vector<RowNumber> out = rows;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (!has_row(outcomes[i])) out[i] = kNone;
    }
    return out;
  }
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;  // written by us only: peers say kNone in `rows`
};

// What every contestant can do with a batch. Row numbers are first-seen order.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual std::string name() const = 0;
  virtual void find(const std::vector<Key>& keys, Answer& answer) = 0;
  virtual void find_or_insert(const std::vector<Key>& keys, Answer& answer) = 0;
};

class Ours : public Contestant {
 public:
  Ours() : table_(config()) {}
  std::string name() const override { return "recsdk"; }
  void find(const std::vector<Key>& keys, Answer& answer) override {
    table_.map(keys, answer.rows, answer.outcomes, {false, nullptr});
  }
  void find_or_insert(const std::vector<Key>& keys, Answer& answer) override {
    table_.map(keys, answer.rows, answer.outcomes, {true, nullptr});
  }
  Table& table() { return table_; }

 private:
  static TableConfig config() {
    TableConfig config;
    config.dim = 1;
    config.num_threads = 1;
    return config;
  }
  Table table_;
};

template <typename Map, int kAhead>
class Peer : public Contestant {
 public:
  explicit Peer(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  void find(const std::vector<Key>& keys, Answer& answer) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      prefetch(keys, i);
      const auto it = map_.find(keys[i]);
      answer.rows[i] = it == map_.end() ? kNone : RowNumber{it->second};
    }
  }
  void find_or_insert(const std::vector<Key>& keys, Answer& answer) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      prefetch(keys, i);
      answer.rows[i] =
          map_.try_emplace(keys[i], static_cast<std::uint32_t>(map_.size())).first->second;
    }
  }

 private:
  void prefetch(const std::vector<Key>& keys, std::size_t i) {
    if constexpr (kAhead > 0) {
      if (i + kAhead < keys.size()) map_.prefetch(keys[i + kAhead]);
    }
  }
  std::string name_;
  Map map_;
};

using Contestants = std::vector<std::unique_ptr<Contestant>>;

Contestants make_contestants() {
  Contestants all;
  all.push_back(std::make_unique<Ours>());
  all.push_back(
      std::make_unique<Peer<std::unordered_map<Key, std::uint32_t>, 0>>("std::unordered_map"));
  all.push_back(
      std::make_unique<Peer<absl::flat_hash_map<Key, std::uint32_t>, 0>>("absl::flat_hash_map"));
  all.push_back(std::make_unique<Peer<absl::flat_hash_map<Key, std::uint32_t>, 16>>(
      "absl::flat_hash_map+prefetch"));
  all.push_back(std::make_unique<Peer<boost::unordered_flat_map<Key, std::uint32_t>, 0>>(
      "boost::unordered_flat_map"));
  return all;
}

using Operation = std::function<void(Contestant&, const std::vector<Key>&, Answer&)>;
using MakeBatch = std::function<std::vector<Key>()>;

// Repetitions in which all contestants take turns on the same batches, each turn a few batches
// long.
std::vector<Rates> race(Contestants& all, int reps, const MakeBatch& make_batch,
                        const Operation& operation) {
  constexpr int kBatches = 4;
  std::vector<Rates> rates;
  for (const auto& c : all) rates.push_back({c->name(), {}});
  for (int rep = -1; rep < reps; ++rep) {  // the first does not count
    std::vector<std::vector<Key>> batches(kBatches);
    for (auto& batch : batches) batch = make_batch();
    std::vector<RowNumber> expected[kBatches];
    for (std::size_t turn = 0; turn < all.size(); ++turn) {
      const std::size_t c = (turn + static_cast<std::size_t>(rep + 1)) % all.size();
      std::vector<Answer> answers(kBatches, Answer(kBatch));
      const double start = now();
      for (std::size_t b = 0; b < kBatches; ++b) operation(*all[c], batches[b], answers[b]);
      const double seconds = now() - start;
      if (rep >= 0) rates[c].values.push_back(kBatches * kBatch / seconds / 1e6);
      for (std::size_t b = 0; b < kBatches; ++b) {
        if (turn == 0) expected[b] = answers[b].normal();
        if (answers[b].normal() != expected[b]) fail(all[c]->name() + " disagrees");
      }
    }
  }
  return rates;
}

Operation finding() {
  return [](Contestant& c, const std::vector<Key>& keys, Answer& a) { c.find(keys, a); };
}

void grow(Contestants& all, const Ids& ids, std::size_t first, std::vector<Rates>& insert_rates) {
  for (std::size_t turn = 0; turn < all.size(); ++turn) {
    const auto& c = all[(first + turn) % all.size()];
    std::vector<Key> batch;
    double seconds = 0;
    for (std::uint64_t begin = 0; begin < ids.count(); begin += kBatch) {
      const std::uint64_t end = std::min<std::uint64_t>(begin + kBatch, ids.count());
      batch.resize(end - begin);
      Answer answer(end - begin);
      for (std::uint64_t i = begin; i < end; ++i) batch[i - begin] = ids.at(i);
      const double start = now();
      c->find_or_insert(batch, answer);
      seconds += now() - start;
      for (std::uint64_t i = begin; i < end; ++i) {
        if (answer.rows[i - begin] != static_cast<RowNumber>(i))
          fail(c->name() + " disagrees on a row number");
      }
    }
    for (Rates& r : insert_rates) {
      if (r.name == c->name()) r.values.push_back(static_cast<double>(ids.count()) / seconds / 1e6);
    }
  }
}

void run_finds(const Options& o, bool is_dense) {
  std::mt19937_64 random(o.seed);
  const Ids ids(is_dense, o.keys);
  const std::string workload = (is_dense ? "dense_" : "uniform_") + count_text(o.keys);
  Contestants all = make_contestants();
  std::vector<Rates> inserts;
  for (const auto& c : all) inserts.push_back({c->name(), {}});
  warm_up(static_cast<std::size_t>(o.keys) * 200);
  const int insert_reps = o.keys <= 1000000 ? std::max(5, o.reps) : o.keys <= 10000000 ? 3 : 1;
  for (int rep = 0; rep < insert_reps; ++rep) {
    all.clear();
    all = make_contestants();
    grow(all, ids, static_cast<std::size_t>(rep), inserts);
  }
  print_record(workload, "insert_from_empty", "Mkeys/s", inserts);

  Table& ours = static_cast<Ours&>(*all[0]).table();
  const TableStats stats = ours.stats();
  print_record(
      workload, "index_bytes_per_key", "bytes",
      {{"recsdk", {static_cast<double>(stats.index_bytes) / static_cast<double>(stats.num_rows)}}});
  const LineLimit limit(static_cast<std::size_t>(stats.index_bytes));
  const auto with_limit = [&](std::vector<Rates> rates) {
    Rates line{"random_line_limit", {}};
    for (int rep = 0; rep < o.reps; ++rep) line.values.push_back(limit.rate(random));
    rates.push_back(line);
    return rates;
  };
  const auto batch_of = [&](const std::function<Key()>& draw) {
    return [draw] {
      std::vector<Key> batch(kBatch);
      for (Key& key : batch) key = draw();
      return batch;
    };
  };
  const auto any_key = [&] { return ids.at(random() % ids.count()); };
  // Ranks beyond the table's are keys that it does not hold.
  const auto half = [&] { return ids.at(random() % ids.count() + (random() % 2) * ids.count()); };
  const auto zipf = [&] { return ids.at(scramble(zipf_rank(random, ids.count())) % ids.count()); };
  std::uint64_t next = 0;
  const auto scan = [&] { return ids.at(next++ % ids.count()); };
  if (is_dense) {
    print_record(workload, "find_scan", "Mkeys/s",
                 with_limit(race(all, o.reps, batch_of(scan), finding())));
    print_record(workload, "find_hit100", "Mkeys/s",
                 with_limit(race(all, o.reps, batch_of(any_key), finding())));
    return;
  }
  print_record(workload, "find_hit100", "Mkeys/s",
               with_limit(race(all, o.reps, batch_of(any_key), finding())));
  print_record(workload, "find_hit50", "Mkeys/s",
               with_limit(race(all, o.reps, batch_of(half), finding())));
  print_record(workload, "find_zipf1.05", "Mkeys/s",
               with_limit(race(all, o.reps, batch_of(zipf), finding())));
  std::uint64_t fresh = 4 * ids.count();
  const auto five_percent_new = [&] {
    return random() % 20 == 0 ? ids.at(fresh++) : ids.at(random() % ids.count());
  };
  print_record(workload, "find_or_insert_new5", "Mkeys/s",
               with_limit(race(all, o.reps, batch_of(five_percent_new),
                               [](Contestant& c, const std::vector<Key>& keys, Answer& a) {
                                 c.find_or_insert(keys, a);
                               })));
}

// A loop in registers that takes about as long as a call: what other work on the machine, or on the
// host of a virtual one, does to calls shows in it too.
class Control {
 public:
  Control() {
    const double start = now();
    run(kProbe);
    num_steps_ = static_cast<std::int64_t>(kMilliseconds / ((now() - start) * 1e3) * kProbe);
  }
  double milliseconds() {
    const double start = now();
    run(num_steps_);
    return (now() - start) * 1e3;
  }

 private:
  static constexpr double kMilliseconds = 1.0;
  static constexpr std::int64_t kProbe = 1 << 22;
  void run(std::int64_t num_steps) {
    for (std::int64_t i = 0; i < num_steps; ++i) x_ = scramble(x_ + 1);
    if (x_ == 0) std::abort();
  }
  std::uint64_t x_ = 1;
  std::int64_t num_steps_ = 0;
};

// What the system takes to back one huge page that is touched for the first time: no call that
// needs new memory can be faster.
Rates first_touches() {
  constexpr std::size_t kPages = 256;
  constexpr std::size_t kPage = std::size_t{2} << 20;
  void* const p = mmap(nullptr, (kPages + 1) * kPage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail("no memory for the control");
  const auto first = (reinterpret_cast<std::uintptr_t>(p) + kPage - 1) / kPage * kPage;
  auto* const pages = reinterpret_cast<volatile char*>(first);
  madvise(reinterpret_cast<void*>(first), kPages * kPage, MADV_HUGEPAGE);
  Rates touches{"recsdk", {}};
  for (std::size_t i = 0; i < kPages; ++i) {
    const double start = now();
    pages[i * kPage] = 1;
    touches.values.push_back((now() - start) * 1e3);
  }
  munmap(p, (kPages + 1) * kPage);
  return touches;
}

// The slowest batch of 8192 new keys while a table grows from empty; with memory reserved ahead
// too. Between the batches runs the control.
void run_growth(const Options& o) {
  warm_up(static_cast<std::size_t>(o.keys * (60 + 4 * o.dim)));
  Control control;
  const Rates touches = first_touches();
  for (const auto& [op, q] : {std::pair{"median", 0.5}, {"p99", 0.99}, {"worst", 1.0}})
    print_record("first_touch_of_a_huge_page", op, "ms", {{"recsdk", {touches.at(q)}}});
  for (const bool reserve : {false, true}) {
    TableConfig config;
    config.dim = o.dim;
    config.num_threads = 1;
    Table table(config);
    if (reserve) table.reserve(o.keys);
    constexpr std::int64_t kSmallBatch = 8192;
    std::vector<Key> keys(kSmallBatch);
    std::vector<RowNumber> rows(kSmallBatch);
    std::vector<Outcome> outcomes(kSmallBatch);
    Rates ours{"recsdk", {}};
    Rates controls{"control", {}};
    for (std::int64_t begin = 0; begin < o.keys; begin += kSmallBatch) {
      for (std::int64_t i = 0; i < kSmallBatch; ++i) {
        keys[static_cast<std::size_t>(i)] =
            static_cast<Key>(scramble(static_cast<std::uint64_t>(begin + i) + 1));
      }
      const double start = now();
      table.map(keys, rows, outcomes, {true, nullptr});
      ours.values.push_back((now() - start) * 1e3);
      controls.values.push_back(control.milliseconds());
    }
    const std::string workload = std::string(reserve ? "growth_reserved_" : "growth_") +
                                 count_text(o.keys) + "_dim" + std::to_string(o.dim);
    const auto print_quantile = [&](const char* op, double q) {
      print_record(workload, op, "ms", {{"recsdk", {ours.at(q)}}, {"control", {controls.at(q)}}});
    };
    print_quantile("batch_median", 0.5);
    print_quantile("batch_p99", 0.99);
    print_quantile("batch_p99.9", 0.999);
    print_quantile("batch_worst", 1.0);
    print_record(
        workload, "index_bytes_per_key", "bytes",
        {{"recsdk",
          {static_cast<double>(table.stats().index_bytes) / static_cast<double>(table.size())}}});
  }
}

// Finds in a table whose keys collide under one hash seed while it has another, beside one of
// uniform keys; and in one that has that very seed.
void run_flood(const Options& o) {
  constexpr std::uint64_t kSeed = 77;
  const internal::SeededHash hash(kSeed);
  std::vector<Key> colliding;
  std::vector<Key> uniform;
  for (std::uint64_t i = 1; colliding.size() < static_cast<std::size_t>(o.keys); ++i) {
    const auto key = static_cast<Key>(scramble(i));
    if (uniform.size() < static_cast<std::size_t>(o.keys)) uniform.push_back(key);
    if (hash(key) >> 55 == 0x55) colliding.push_back(key);
  }
  const auto filled = [](std::uint64_t seed, const std::vector<Key>& keys) {
    TableConfig config;
    config.dim = 1;
    config.num_threads = 1;
    config.hash_seed = seed;
    auto table = std::make_unique<Table>(config);
    Answer answer(keys.size());
    table->map(keys, answer.rows, answer.outcomes, {true, nullptr});
    return table;
  };
  const std::unique_ptr<Table> tables[] = {filled(kSeed + 1, uniform), filled(kSeed + 1, colliding),
                                           filled(kSeed, colliding)};
  std::vector<Rates> rates = {{"uniform keys", {}}, {"recsdk", {}}, {"their own seed", {}}};
  std::mt19937_64 random(o.seed);
  warm_up(std::size_t{64} << 20);
  for (int rep = 0; rep < o.reps; ++rep) {
    for (std::size_t t = 0; t < 3; ++t) {
      const std::vector<Key>& keys = t == 0 ? uniform : colliding;
      std::vector<Key> batch(kBatch);
      for (Key& key : batch) key = keys[random() % keys.size()];
      Answer answer(kBatch);
      const double start = now();
      tables[t]->map(batch, answer.rows, answer.outcomes, {});
      rates[t].values.push_back(kBatch / (now() - start) / 1e6);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        if (keys[static_cast<std::size_t>(answer.rows[i])] != batch[i]) fail("flood: a wrong row");
      }
    }
  }
  const std::string workload = "flood_" + count_text(o.keys);
  print_record(workload, "find_hit100", "Mkeys/s", rates);
  const auto count = [](const Table& table, auto member) {
    return std::vector<double>{static_cast<double>(table.stats().*member)};
  };
  print_record(workload, "directory_own_seed", "entries",
               {{"recsdk", count(*tables[2], &TableStats::index_directory)},
                {"uniform keys", count(*tables[0], &TableStats::index_directory)}});
  print_record(workload, "crowded_segments_own_seed", "segments",
               {{"recsdk", count(*tables[2], &TableStats::index_crowded)}});
}

}  // namespace
}  // namespace recsdk::bench

int main(int argc, char** argv) {
  using namespace recsdk::bench;
  const Options options = parse(argc, argv);
  if (options.workload == "uniform")
    run_finds(options, false);
  else if (options.workload == "dense")
    run_finds(options, true);
  else if (options.workload == "growth")
    run_growth(options);
  else if (options.workload == "flood")
    run_flood(options);
  else
    fail("unknown workload " + options.workload + "; choose uniform, dense, growth or flood");
}
