// Frozen rows beside what memory allows: a loop that reads the lines of memory which pooling must,
// those of the index and of the records of the same keys in the same order, and does nothing else.
//
//   serving_bench --workload NAME --file FROZEN --ids FILE [--bag L] [--reps R]
//
// FILE has raw ids, 8 bytes each, all of which have a row. Prints a JSON object, as maps_bench
// does: nanoseconds of the processor's time a key.
#include <ctime>
#include <fstream>
#include <iterator>

#include "harness.h"
#include "recsdk/serving/serving_table.h"
#include "serving/find.h"

namespace recsdk::bench {
namespace {

constexpr std::size_t kAhead = 64;
constexpr std::size_t kKeysOfCall = 81'920;

struct ServingOptions {
  std::string workload;
  std::string file;
  std::string ids;
  std::int64_t bag = 20;
  int reps = 9;
};

ServingOptions parse_serving(int argc, char** argv) {
  ServingOptions o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const char* const value = argv[i + 1];
    if (name == "--workload")
      o.workload = value;
    else if (name == "--file")
      o.file = value;
    else if (name == "--ids")
      o.ids = value;
    else if (name == "--bag")
      o.bag = std::atoll(value);
    else if (name == "--reps")
      o.reps = std::atoi(value);
    else
      fail("unknown option " + std::string(name));
  }
  return o;
}

std::vector<Key> read_keys(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
  std::vector<Key> keys(raw.size() / sizeof(Key));
  std::memcpy(keys.data(), raw.data(), keys.size() * sizeof(Key));
  if (keys.empty()) fail("no ids in " + path);
  return keys;
}

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// What a key has to read.
struct Lines {
  const char* line;
  const char* record;
};

std::vector<Lines> lines_of(const internal::FrozenView& view, const std::vector<Key>& keys) {
  const internal::FrozenView* const views[] = {&view};
  const internal::Sources sources{{views}, {}};
  std::vector<Lines> lines;
  for (const Key key : keys) {
    const std::uint64_t hash = internal::frozen_hash(key, view.hash_seed);
    const auto* const record = reinterpret_cast<const char*>(internal::find_record(&sources, key));
    if (record == nullptr) fail("an id has no row");
    lines.push_back(
        {reinterpret_cast<const char*>(view.lines + internal::frozen_line(hash, view.num_lines)),
         record});
  }
  return lines;
}

/// Reads a word of each line.
std::uint64_t read_lines(const std::vector<Lines>& lines, std::int64_t record_bytes) {
  std::uint64_t sum = 0;
  const auto word = [](const char* p) {
    std::uint64_t x = 0;
    std::memcpy(&x, p, sizeof(x));
    return x;
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    __builtin_prefetch(lines[std::min(i + 2 * kAhead, lines.size() - 1)].line, 0, 2);
    const char* const ahead = lines[std::min(i + kAhead, lines.size() - 1)].record;
    for (std::int64_t at = 0; at < record_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    __builtin_prefetch(ahead + record_bytes - 1, 0, 2);
    sum += word(lines[i].line);
    for (std::int64_t at = 0; at + 8 <= record_bytes; at += 64) sum += word(lines[i].record + at);
    sum += word(lines[i].record + record_bytes - 8);
  }
  return sum;
}

void pool_all(const ServingTable& table, const std::vector<Key>& keys, std::int64_t bag,
              std::vector<float>& out) {
  const std::int64_t dim = table.info().dim;
  std::vector<std::int64_t> offsets;
  for (std::size_t first = 0; first < keys.size(); first += kKeysOfCall) {
    const std::span<const Key> some =
        std::span(keys).subspan(first, std::min(kKeysOfCall, keys.size() - first));
    offsets.clear();
    for (std::int64_t end = 0; end < std::ssize(some); end += bag) offsets.push_back(end);
    offsets.push_back(std::ssize(some));
    table.pool({{some, offsets, {}, Pooling::kSum}, out.data(), dim, {}});
  }
}

void run(const ServingOptions& o) {
  const ServingTable table({&o.file, 1});
  table.preload();
  const internal::FrozenFile file(o.file);
  const std::vector<Key> keys = read_keys(o.ids);
  const std::vector<Lines> lines = lines_of(file.view(), keys);
  std::vector<float> out((kKeysOfCall / static_cast<std::size_t>(o.bag) + 2) *
                         static_cast<std::size_t>(table.info().dim));
  std::vector<Rates> rates{{"recsdk", {}}, {"its lines of memory", {}}};
  std::uint64_t sum = 0;
  for (int turn = -1; turn < o.reps; ++turn) {  // the first does not count
    const double start = processor_seconds();
    pool_all(table, keys, o.bag, out);
    const double between = processor_seconds();
    sum += read_lines(lines, file.view().record_bytes);
    const double end = processor_seconds();
    if (turn < 0) continue;
    const double of_key = 1e9 / static_cast<double>(keys.size());
    rates[0].values.push_back((between - start) * of_key);
    rates[1].values.push_back((end - between) * of_key);
  }
  if (sum == 0) std::abort();
  print_record(o.workload, "pool", "ns", rates);
}

}  // namespace
}  // namespace recsdk::bench

int main(int argc, char** argv) { recsdk::bench::run(recsdk::bench::parse_serving(argc, argv)); }
