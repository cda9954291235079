// Rows: pooling and updates beside what memory allows, with one and two threads, over many tables,
// and at several fill levels.
//
//   rows_bench --workload pool|threads|many|fill|insert --keys N [--dim D] [--reps R] [--seed S]
//
// Prints one JSON object per operation on a line of its own, as maps_bench does.
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "harness.h"

namespace recsdk::bench {
namespace {

constexpr std::int64_t kBags = 8192;
constexpr std::int64_t kMeanLength = 10;

// Bags over a table's keys, mapped.
struct Batch {
  std::vector<Key> keys;
  std::vector<RowNumber> rows;
  std::vector<Outcome> outcomes;
  std::vector<std::int64_t> offsets = {0};
  Bags bags() const { return {rows, outcomes, offsets, {}, Pooling::kSum}; }
};

Batch make_batch(const Ids& ids, bool is_zipf, std::mt19937_64& random, std::int64_t num_bags) {
  Batch batch;
  std::poisson_distribution<std::int64_t> length(kMeanLength);
  for (std::int64_t b = 0; b < num_bags; ++b) {
    for (std::int64_t i = length(random); i > 0; --i) {
      const std::uint64_t rank = is_zipf ? scramble(zipf_rank(random, ids.count())) : random();
      batch.keys.push_back(ids.at(rank % ids.count()));
    }
    batch.offsets.push_back(static_cast<std::int64_t>(batch.keys.size()));
  }
  batch.rows.resize(batch.keys.size());
  batch.outcomes.resize(batch.keys.size());
  return batch;
}

std::unique_ptr<Table> make_table(const Options& o, int num_threads, std::int64_t num_keys,
                                  OptimizerConfig optimizer = OptimizerConfig::sgd(0.01F)) {
  TableConfig config;
  config.dim = o.dim;
  config.num_threads = num_threads;
  config.optimizer = optimizer;
  auto table = std::make_unique<Table>(config);
  const Ids ids(false, num_keys);
  std::vector<Key> keys(kBatch);
  std::vector<RowNumber> rows(kBatch);
  std::vector<Outcome> outcomes(kBatch);
  for (std::int64_t begin = 0; begin < num_keys; begin += kBatch) {
    const auto n = static_cast<std::size_t>(std::min(kBatch, num_keys - begin));
    for (std::size_t i = 0; i < n; ++i) keys[i] = ids.at(static_cast<std::uint64_t>(begin) + i);
    table->map(std::span(keys).first(n), std::span(rows).first(n), std::span(outcomes).first(n),
               {true, nullptr});
  }
  return table;
}

void map(Table& table, Batch& batch) { table.map(batch.keys, batch.rows, batch.outcomes, {}); }

using Work = std::function<void(int rep)>;

// Rates of works that take turns, in units a second; the first repetition does not count.
std::vector<Rates> race(const std::vector<std::pair<std::string, Work>>& works, int reps,
                        const std::function<double(int rep)>& millions) {
  std::vector<Rates> rates;
  for (const auto& work : works) rates.push_back({work.first, {}});
  for (int rep = -1; rep < reps; ++rep) {
    for (std::size_t turn = 0; turn < works.size(); ++turn) {
      const std::size_t w = (turn + static_cast<std::size_t>(rep + 1)) % works.size();
      const double start = now();
      works[w].second(rep + 1);
      const double seconds = now() - start;
      if (rep >= 0) rates[w].values.push_back(millions(rep + 1) / seconds);
    }
  }
  return rates;
}

// Random rows of an array, added up with the next ones on their way: no more than memory and one
// addition an element.
void gather_and_add(const float* data, std::int64_t dim, const std::vector<RowNumber>& rows,
                    std::vector<float>& sum) {
  constexpr std::size_t kAhead = 12;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) {
      const float* const next = data + rows[i + kAhead] * dim;
      for (std::int64_t c = 0; c < dim; c += 16) __builtin_prefetch(next + c);
    }
    const float* const row = data + rows[i] * dim;
    float* const out = sum.data();
    for (std::int64_t c = 0; c < dim; ++c) out[c] += row[c];
  }
}

void run_pool(const Options& o) {
  warm_up(static_cast<std::size_t>(o.keys * o.dim * 9));
  const auto table = make_table(o, 1, o.keys);
  const HugeArray<float> array(static_cast<std::size_t>(o.keys * o.dim));
  std::mt19937_64 random(o.seed);
  for (const bool is_zipf : {false, true}) {
    std::vector<Batch> batches;
    for (int i = 0; i < 6; ++i) {
      batches.push_back(make_batch(Ids(false, o.keys), is_zipf, random, kBags));
      map(*table, batches.back());
    }
    std::vector<float> out(static_cast<std::size_t>(kBags * o.dim));
    std::vector<float> sum(static_cast<std::size_t>(o.dim));
    const auto batch_of = [&](int rep) -> Batch& {
      return batches[static_cast<std::size_t>(rep) % batches.size()];
    };
    const std::vector<std::pair<std::string, Work>> works = {
        {"recsdk",
         [&](int rep) {
           const PoolBlock block{batch_of(rep).bags(), out.data(), o.dim};
           table->pool({&block, 1});
         }},
        {"random_row_limit",
         [&](int rep) { gather_and_add(array.data(), o.dim, batch_of(rep).rows, sum); }}};
    const auto rates = race(works, o.reps, [&](int rep) {
      return static_cast<double>(batch_of(rep).rows.size()) / 1e6;
    });
    if (sum[0] == 0) fail("pool: the limit has read nothing");
    print_record(
        (is_zipf ? "zipf1.05_" : "uniform_") + count_text(o.keys) + "_dim" + std::to_string(o.dim),
        "pool_known_rows", "Mrows/s", rates);
  }
}

void run_threads(const Options& o) {
  warm_up(static_cast<std::size_t>(o.keys * o.dim * 9));
  const std::unique_ptr<Table> tables[] = {make_table(o, 2, o.keys), make_table(o, 1, o.keys)};
  std::mt19937_64 random(o.seed);
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) {
    batches.push_back(make_batch(Ids(false, o.keys), false, random, 2 * kBags));
    map(*tables[0], batches.back());
  }
  std::vector<float> values(static_cast<std::size_t>(2 * kBags * o.dim), 0.5F);
  const auto batch_of = [&](int rep) -> Batch& {
    return batches[static_cast<std::size_t>(rep) % batches.size()];
  };
  const auto both = [&](const std::function<void(Table&, int)>& work) {
    return race({{"recsdk", [&](int rep) { work(*tables[0], rep); }},
                 {"one thread", [&](int rep) { work(*tables[1], rep); }}},
                o.reps,
                [&](int rep) { return static_cast<double>(batch_of(rep).rows.size()) / 1e6; });
  };
  const std::string workload = "two_threads_" + count_text(o.keys) + "_dim" + std::to_string(o.dim);
  print_record(workload, "find", "Mkeys/s",
               both([&](Table& table, int rep) { map(table, batch_of(rep)); }));
  print_record(workload, "pool_known_rows", "Mrows/s", both([&](Table& table, int rep) {
                 const PoolBlock block{batch_of(rep).bags(), values.data(), o.dim};
                 table.pool({&block, 1});
               }));
  print_record(workload, "update_known_rows", "Mrows/s", both([&](Table& table, int rep) {
                 const GradBlock block{batch_of(rep).bags(), values.data(), o.dim, nullptr};
                 table.update({&block, 1});
               }));
}

// A hundred tables in one call of each kind, beside one table of as many rows and the same ids.
void run_many(const Options& o) {
  constexpr std::int64_t kTables = 100;
  warm_up(static_cast<std::size_t>(o.keys * o.dim * 9));
  const auto one = make_table(o, 1, o.keys);
  std::vector<std::unique_ptr<Table>> many;
  for (std::int64_t t = 0; t < kTables; ++t) many.push_back(make_table(o, 1, o.keys / kTables));
  std::mt19937_64 random(o.seed);
  Batch whole = make_batch(Ids(false, o.keys), false, random, kBags);
  std::vector<Batch> parts;
  for (std::int64_t t = 0; t < kTables; ++t)
    parts.push_back(make_batch(Ids(false, o.keys / kTables), false, random, kBags / kTables));
  std::vector<float> values(static_cast<std::size_t>(kBags * o.dim), 0.5F);
  std::vector<MapCall> maps;
  std::vector<PoolBlock> pool_blocks;
  std::vector<GradBlock> grad_blocks;
  for (std::size_t t = 0; t < parts.size(); ++t) {
    maps.push_back({many[t].get(), parts[t].keys, parts[t].rows, parts[t].outcomes, {true, {}}});
    float* const at = values.data() + static_cast<std::int64_t>(t) * (kBags / kTables) * o.dim;
    pool_blocks.push_back({parts[t].bags(), at, o.dim});
    grad_blocks.push_back({parts[t].bags(), at, o.dim, nullptr});
  }
  std::vector<PoolCall> pools;
  std::vector<UpdateCall> updates;
  for (std::size_t t = 0; t < parts.size(); ++t) {
    pools.push_back({many[t].get(), {&pool_blocks[t], 1}});
    updates.push_back({many[t].get(), {&grad_blocks[t], 1}});
  }
  std::size_t num_keys = 0;
  for (const Batch& part : parts) num_keys += part.keys.size();
  const double scale = static_cast<double>(whole.keys.size()) / static_cast<double>(num_keys);
  const auto rates = race(
      {{"recsdk",
        [&](int) {
          map_tables(maps);
          pool_tables(pools);
          update_tables(updates);
        }},
       {"one table",
        [&](int) {
          const MapCall call{one.get(), whole.keys, whole.rows, whole.outcomes, {true, nullptr}};
          map_tables({&call, 1});
          const PoolBlock pool_block{whole.bags(), values.data(), o.dim};
          one->pool({&pool_block, 1});
          const GradBlock grad_block{whole.bags(), values.data(), o.dim, {}};
          one->update({&grad_block, 1});
        }}},
      o.reps, [&](int) { return static_cast<double>(num_keys) / 1e6; });
  // Both do the same number of keys but for the chance of the draw.
  std::vector<Rates> scaled = rates;
  for (double& value : scaled[1].values) value *= scale;
  print_record("100_tables_of_" + count_text(o.keys / kTables) + "_dim" + std::to_string(o.dim),
               "map_pool_update", "Mkeys/s", scaled);
}

// The layout of HierarchicalKV's README: load factor = rows used / max_rows.
void run_fill(const Options& o) {
  warm_up(static_cast<std::size_t>(o.keys * o.dim * 5));
  for (const double load : {0.5, 0.75, 1.0}) {
    const auto used = static_cast<std::int64_t>(static_cast<double>(o.keys) * load);
    TableConfig config;
    config.dim = o.dim;
    config.num_threads = 1;
    config.max_rows = o.keys;
    config.eviction_groups = 1;  // so that all rows can be used
    Table table(config);
    const Ids ids(false, o.keys * 4);
    std::vector<float> values(static_cast<std::size_t>(kBatch * o.dim), 0.25F);
    std::vector<Key> keys(kBatch);
    std::vector<RowNumber> rows(kBatch);
    std::vector<Outcome> outcomes(kBatch);
    for (std::int64_t begin = 0; begin < used; begin += kBatch) {
      const auto n = static_cast<std::size_t>(std::min(kBatch, used - begin));
      for (std::size_t i = 0; i < n; ++i) keys[i] = ids.at(static_cast<std::uint64_t>(begin) + i);
      table.map(std::span(keys).first(n), std::span(rows).first(n), std::span(outcomes).first(n),
                {true, nullptr});
    }
    std::mt19937_64 random(o.seed);
    const auto any = [&] { return ids.at(random() % static_cast<std::uint64_t>(used)); };
    const std::string workload =
        "load_" + std::to_string(load).substr(0, 4) + "_dim" + std::to_string(o.dim);
    const auto measure = [&](const char* op, const std::function<void()>& call) {
      std::vector<double> samples;
      for (int rep = -1; rep < o.reps; ++rep) {
        for (Key& key : keys) key = any();
        const double start = now();
        call();
        if (rep >= 0) samples.push_back(kBatch / (now() - start) / 1e9);
      }
      print_record(workload, op, "B-KV/s", {{"recsdk", samples}});
    };
    measure("find", [&] { table.lookup(keys, values.data(), outcomes); });
    measure("find*", [&] { table.map(keys, rows, outcomes, {}); });
    measure("find_or_insert", [&] { table.find_or_insert(keys, values.data(), outcomes); });
    measure("insert_or_assign", [&] { table.upsert(keys, values.data(), nullptr, outcomes); });
  }
}

// Millions of new keys a second into as many empty tables, in calls of 16 batches over all of them.
double insertion_rate(const Options& o, int num_threads, std::uint64_t num_tables) {
  const std::int64_t batch = 16 * kBatch / static_cast<std::int64_t>(num_tables);
  const std::int64_t num_calls = std::max<std::int64_t>(o.keys / (16 * kBatch), 1);
  TableConfig config;
  config.dim = o.dim;
  config.num_threads = num_threads;
  std::vector<std::unique_ptr<Table>> tables;
  std::vector<Batch> batches(num_tables);
  for (Batch& b : batches) {
    tables.push_back(std::make_unique<Table>(config));
    b.keys.resize(static_cast<std::size_t>(batch));
    b.rows.resize(b.keys.size());
    b.outcomes.resize(b.keys.size());
  }
  set_num_threads(num_threads);
  double seconds = 0;
  for (std::uint64_t call = 0, next = 0; call < static_cast<std::uint64_t>(num_calls); ++call) {
    std::vector<MapCall> calls;
    for (std::size_t t = 0; t < num_tables; ++t) {
      for (Key& key : batches[t].keys) key = static_cast<Key>(scramble(++next));
      calls.push_back({tables[t].get(), batches[t].keys, batches[t].rows, batches[t].outcomes,
                       MapOptions{true, nullptr}});
    }
    const double start = now();
    map_tables(calls);
    seconds += now() - start;
  }
  return static_cast<double>(batch * num_calls) * static_cast<double>(num_tables) / seconds / 1e6;
}

// New keys with one and two threads in turns, into one table and into 26.
void run_insert(const Options& o) {
  for (const std::uint64_t num_tables : {1U, 26U}) {
    std::vector<Rates> all = {{"1 thread", {}}, {"2 threads", {}}};
    for (int rep = -1; rep < o.reps; ++rep) {
      for (int threads = 1; threads <= 2; ++threads) {
        const double rate = insertion_rate(o, threads, num_tables);
        if (rep >= 0) all[static_cast<std::size_t>(threads - 1)].values.push_back(rate);
      }
    }
    print_record("insert_tables" + std::to_string(num_tables) + "_dim" + std::to_string(o.dim),
                 "insert_new", "Mkeys/s", all);
  }
}

}  // namespace
}  // namespace recsdk::bench

int main(int argc, char** argv) {
  using namespace recsdk::bench;
  const Options options = parse(argc, argv);
  if (options.workload == "pool")
    run_pool(options);
  else if (options.workload == "threads")
    run_threads(options);
  else if (options.workload == "many")
    run_many(options);
  else if (options.workload == "fill")
    run_fill(options);
  else if (options.workload == "insert")
    run_insert(options);
  else
    fail("unknown workload " + options.workload + "; choose pool, threads, many, fill or insert");
}
