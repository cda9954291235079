// Maps from 64-bit keys to row numbers: recsdk::Table::map beside std, Abseil and Boost,
// interleaved in one process.
//
//   maps_bench --workload NAME --keys N [--reps R] [--seed S]
//
// Prints one JSON object per operation on a line of its own: the median and the quartiles of the
// rates of every contestant in the repetitions, which take turns. Every answer is compared with
// that of the first peer.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <absl/container/flat_hash_map.h>
#include <boost/unordered/unordered_flat_map.hpp>

#include "recsdk/recsdk.h"

namespace {

using recsdk::Key;
using recsdk::Outcome;
using recsdk::RowNumber;

constexpr std::int64_t kBatch = 65536;
constexpr RowNumber kNone = -1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// What every contestant can do with a batch. Row numbers are first-seen order.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual std::string name() const = 0;
  virtual void find(const std::vector<Key>& keys, std::vector<RowNumber>& rows) = 0;
  virtual void find_or_insert(const std::vector<Key>& keys, std::vector<RowNumber>& rows) = 0;
};

class Ours : public Contestant {
 public:
  Ours() : table_(config()), outcomes_(kBatch) {}
  std::string name() const override { return "recsdk"; }
  void find(const std::vector<Key>& keys, std::vector<RowNumber>& rows) override {
    map(keys, rows, false);
  }
  void find_or_insert(const std::vector<Key>& keys, std::vector<RowNumber>& rows) override {
    map(keys, rows, true);
  }
  recsdk::Table& table() { return table_; }

 private:
  static recsdk::TableConfig config() {
    recsdk::TableConfig config;
    config.dim = 1;
    config.num_threads = 1;
    return config;
  }
  void map(const std::vector<Key>& keys, std::vector<RowNumber>& rows, bool insert) {
    outcomes_.resize(keys.size());
    table_.map(keys, rows, outcomes_, {insert, nullptr});
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!recsdk::has_row(outcomes_[i])) rows[i] = kNone;
    }
  }
  recsdk::Table table_;
  std::vector<Outcome> outcomes_;
};

template <typename Map, int kAhead>
class Peer : public Contestant {
 public:
  explicit Peer(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  void find(const std::vector<Key>& keys, std::vector<RowNumber>& rows) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      prefetch(keys, i);
      const auto it = map_.find(keys[i]);
      rows[i] = it == map_.end() ? kNone : RowNumber{it->second};
    }
  }
  void find_or_insert(const std::vector<Key>& keys, std::vector<RowNumber>& rows) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      prefetch(keys, i);
      rows[i] = map_.try_emplace(keys[i], static_cast<std::uint32_t>(map_.size())).first->second;
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

// Random 64-byte lines of an array of `bytes`, fetched ahead: what memory allows. Millions a
// second.
class LineLimit {
 public:
  explicit LineLimit(std::size_t bytes) : lines_(std::max<std::size_t>(bytes / 64, 64)) {
    void* p = mmap(nullptr, lines_ * 64 + (2U << 20), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto address =
        (reinterpret_cast<std::uintptr_t>(p) + (2U << 20) - 1) / (2U << 20) * (2U << 20);
    data_ = reinterpret_cast<std::uint64_t*>(address);
    madvise(data_, lines_ * 64, MADV_HUGEPAGE);
    std::memset(data_, 1, lines_ * 64);
  }
  double rate(std::mt19937_64& random) const {
    std::vector<std::uint32_t> order(kBatch);
    for (auto& o : order) o = static_cast<std::uint32_t>(random() % lines_);
    std::uint64_t sum = 0;
    const double start = now();
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i + 16 < order.size()) __builtin_prefetch(data_ + std::size_t{order[i + 16]} * 8);
      sum += data_[std::size_t{order[i]} * 8];
    }
    const double seconds = now() - start;
    if (sum == 0) std::abort();
    return kBatch / seconds / 1e6;
  }

 private:
  std::size_t lines_;
  std::uint64_t* data_;
};

struct Rates {
  std::string name;
  std::vector<double> values;
  double at(double q) const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
  }
};

void print_record(const std::string& workload, const std::string& op, const std::string& unit,
                  const std::vector<Rates>& all) {
  std::printf("{\"workload\": \"%s\", \"op\": \"%s\", \"unit\": \"%s\", \"contestants\": {",
              workload.c_str(), op.c_str(), unit.c_str());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::printf("%s\"%s\": [%.4g, %.4g, %.4g]", i == 0 ? "" : ", ", all[i].name.c_str(),
                all[i].at(0.5), all[i].at(0.25), all[i].at(0.75));
  }
  std::printf("}}\n");
  std::fflush(stdout);
}

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "maps_bench: %s\n", message.c_str());
  std::exit(1);
}

using Operation =
    std::function<void(Contestant&, const std::vector<Key>&, std::vector<RowNumber>&)>;
using MakeBatch = std::function<std::vector<Key>()>;

// Repetitions in which all contestants take turns on the same batches, each turn a few batches
// long.
std::vector<Rates> race(Contestants& all, int reps, const MakeBatch& make_batch,
                        const Operation& operation) {
  constexpr int kBatches = 4;
  std::vector<Rates> rates;
  for (const auto& c : all) rates.push_back({c->name(), {}});
  for (int rep = 0; rep < reps; ++rep) {
    std::vector<std::vector<Key>> batches(kBatches);
    for (auto& batch : batches) batch = make_batch();
    std::vector<std::vector<RowNumber>> expected(kBatches);
    for (std::size_t turn = 0; turn < all.size(); ++turn) {
      const std::size_t c = (turn + static_cast<std::size_t>(rep)) % all.size();
      std::vector<std::vector<RowNumber>> rows(kBatches, std::vector<RowNumber>(kBatch));
      const double start = now();
      for (std::size_t b = 0; b < kBatches; ++b) operation(*all[c], batches[b], rows[b]);
      rates[c].values.push_back(kBatches * kBatch / (now() - start) / 1e6);
      if (expected[0].empty()) expected = rows;
      if (rows != expected) fail(all[c]->name() + " disagrees");
    }
  }
  return rates;
}

struct Options {
  std::string workload = "uniform";
  std::int64_t keys = 1000000;
  int reps = 9;
  std::uint64_t seed = 1;
};

std::string count_text(std::int64_t n) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0e", static_cast<double>(n));
  std::string out(text);
  out.erase(std::remove(out.begin(), out.end(), '+'), out.end());
  const auto zero = out.find("e0");
  if (zero != std::string::npos) out.erase(zero + 1, 1);
  return out;
}

Operation finding() {
  return [](Contestant& c, const std::vector<Key>& k, std::vector<RowNumber>& r) { c.find(k, r); };
}

// Ids of a table that has grown to `keys`: scattered, or dense from 0.
class Ids {
 public:
  Ids(bool is_dense, std::int64_t count)
      : is_dense_(is_dense), count_(static_cast<std::uint64_t>(count)) {}
  Key at(std::uint64_t rank) const {
    return static_cast<Key>(is_dense_ ? rank : scramble(rank + 1));
  }
  std::uint64_t count() const { return count_; }

 private:
  bool is_dense_;
  std::uint64_t count_;
};

void grow(Contestants& all, const Ids& ids, std::vector<Rates>* insert_rates) {
  for (auto& c : all) {
    std::vector<Key> batch;
    std::vector<RowNumber> rows;
    double seconds = 0;
    for (std::uint64_t begin = 0; begin < ids.count(); begin += kBatch) {
      const std::uint64_t end = std::min<std::uint64_t>(begin + kBatch, ids.count());
      batch.resize(end - begin);
      rows.resize(end - begin);
      for (std::uint64_t i = begin; i < end; ++i) batch[i - begin] = ids.at(i);
      const double start = now();
      c->find_or_insert(batch, rows);
      seconds += now() - start;
      for (std::uint64_t i = begin; i < end; ++i) {
        if (rows[i - begin] != static_cast<RowNumber>(i))
          fail(c->name() + " disagrees on a row number");
      }
    }
    if (insert_rates != nullptr) {
      for (Rates& r : *insert_rates) {
        if (r.name == c->name())
          r.values.push_back(static_cast<double>(ids.count()) / seconds / 1e6);
      }
    }
  }
}

// Ranks by a power law of exponent 1.05: the inverse of the continuous distribution function.
std::uint64_t zipf_rank(std::mt19937_64& random, std::uint64_t count) {
  constexpr double kExponent = 1.05;
  const double u = std::uniform_real_distribution<double>()(random);
  const double top = std::pow(static_cast<double>(count), 1.0 - kExponent);
  const double x = std::pow(1.0 + u * (top - 1.0), 1.0 / (1.0 - kExponent));
  return std::min<std::uint64_t>(static_cast<std::uint64_t>(x) - 1, count - 1);
}

void run_finds(const Options& o, bool is_dense) {
  std::mt19937_64 random(o.seed);
  const Ids ids(is_dense, o.keys);
  const std::string workload = (is_dense ? "dense_" : "uniform_") + count_text(o.keys);
  Contestants all = make_contestants();
  std::vector<Rates> inserts;
  for (const auto& c : all) inserts.push_back({c->name(), {}});
  const int insert_reps = o.keys <= 1000000 ? std::max(3, o.reps) : 1;
  for (int rep = 0; rep < insert_reps; ++rep) {
    all = make_contestants();
    grow(all, ids, &inserts);
  }
  print_record(workload, "insert_from_empty", "Mkeys/s", inserts);

  recsdk::Table& ours = static_cast<Ours&>(*all[0]).table();
  const recsdk::TableStats stats = ours.stats();
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
                               [](Contestant& c, const std::vector<Key>& k,
                                  std::vector<RowNumber>& r) { c.find_or_insert(k, r); })));
}

// The slowest batch of 8192 new keys while a table grows from empty; with memory reserved ahead
// too.
void run_growth(const Options& o) {
  for (const bool reserve : {false, true}) {
    recsdk::TableConfig config;
    config.dim = 1;
    config.num_threads = 1;
    recsdk::Table table(config);
    if (reserve) table.reserve(o.keys);
    constexpr std::int64_t kSmallBatch = 8192;
    std::vector<Key> keys(kSmallBatch);
    std::vector<RowNumber> rows(kSmallBatch);
    std::vector<Outcome> outcomes(kSmallBatch);
    std::vector<double> milliseconds;
    for (std::int64_t begin = 0; begin < o.keys; begin += kSmallBatch) {
      for (std::int64_t i = 0; i < kSmallBatch; ++i) {
        keys[static_cast<std::size_t>(i)] =
            static_cast<Key>(scramble(static_cast<std::uint64_t>(begin + i) + 1));
      }
      const double start = now();
      table.map(keys, rows, outcomes, {true, nullptr});
      milliseconds.push_back((now() - start) * 1e3);
    }
    const Rates all{"recsdk", milliseconds};
    const std::string workload =
        std::string(reserve ? "growth_reserved_" : "growth_") + count_text(o.keys);
    print_record(workload, "batch_median", "ms", {{"recsdk", {all.at(0.5)}}});
    print_record(workload, "batch_p99", "ms", {{"recsdk", {all.at(0.99)}}});
    print_record(workload, "batch_worst", "ms", {{"recsdk", {all.at(1.0)}}});
    print_record(
        workload, "index_bytes_per_key", "bytes",
        {{"recsdk",
          {static_cast<double>(table.stats().index_bytes) / static_cast<double>(table.size())}}});
  }
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--workload")
      o.workload = argv[i + 1];
    else if (name == "--keys")
      o.keys = static_cast<std::int64_t>(std::atof(argv[i + 1]));
    else if (name == "--reps")
      o.reps = std::atoi(argv[i + 1]);
    else if (name == "--seed")
      o.seed = static_cast<std::uint64_t>(std::atoll(argv[i + 1]));
    else
      fail("unknown option " + std::string(name));
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.workload == "uniform")
    run_finds(options, false);
  else if (options.workload == "dense")
    run_finds(options, true);
  else if (options.workload == "growth")
    run_growth(options);
  else
    fail("unknown workload " + options.workload + "; choose uniform, dense or growth");
}
