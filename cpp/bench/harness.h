// What the benchmarks share: clocks, keys, limits of the machine, records, options.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "recsdk/recsdk.h"

namespace recsdk::bench {

constexpr std::int64_t kBatch = 65536;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// Brings the processor to speed, and has the host of a virtual machine back the memory that the
// contestants will get: otherwise the first of them pays for both.
inline void warm_up(std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{64} << 20;
  std::vector<void*> pieces;
  for (std::size_t done = 0; done < bytes; done += kPiece) {
    void* const p =
        mmap(nullptr, kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) break;
    std::memset(p, 1, kPiece);
    pieces.push_back(p);
  }
  for (void* const p : pieces) munmap(p, kPiece);
  std::uint64_t x = 1;
  for (const double end = now() + 0.5; now() < end;) x = scramble(x);
  if (x == 0) std::abort();
}

// Memory on huge pages, of random contents that are numbers.
template <typename T>
class HugeArray {
 public:
  explicit HugeArray(std::size_t size) : size_(size) {
    void* p = mmap(nullptr, size * sizeof(T) + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::abort();
    const auto address =
        (reinterpret_cast<std::uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage;
    mapped_ = p;
    data_ = reinterpret_cast<T*>(address);
    madvise(data_, size * sizeof(T), MADV_HUGEPAGE);
    for (std::size_t i = 0; i < size; ++i) data_[i] = static_cast<T>(1 + i % 7);
  }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  ~HugeArray() { munmap(mapped_, size_ * sizeof(T) + kHugePage); }
  const T* data() const { return data_; }

 private:
  static constexpr std::size_t kHugePage = 2U << 20;
  std::size_t size_;
  void* mapped_ = nullptr;
  T* data_ = nullptr;
};

// Random 64-byte lines of an array of `bytes`, fetched ahead: what memory allows. Millions a
// second.
class LineLimit {
 public:
  explicit LineLimit(std::size_t bytes)
      : lines_(std::max<std::size_t>(bytes / 64, 64)), array_(lines_ * 8) {}
  double rate(std::mt19937_64& random) const {
    std::vector<std::uint32_t> order(kBatch);
    for (auto& o : order) o = static_cast<std::uint32_t>(random() % lines_);
    const std::uint64_t* const data = array_.data();
    std::uint64_t sum = 0;
    const double start = now();
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i + 16 < order.size()) __builtin_prefetch(data + std::size_t{order[i + 16]} * 8);
      sum += data[std::size_t{order[i]} * 8];
    }
    const double seconds = now() - start;
    if (sum == 0) std::abort();
    return kBatch / seconds / 1e6;
  }

 private:
  std::size_t lines_;
  HugeArray<std::uint64_t> array_;
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

inline void print_record(const std::string& workload, const std::string& op,
                         const std::string& unit, const std::vector<Rates>& all) {
  std::printf("{\"workload\": \"%s\", \"op\": \"%s\", \"unit\": \"%s\", \"contestants\": {",
              workload.c_str(), op.c_str(), unit.c_str());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::printf("%s\"%s\": [%.4g, %.4g, %.4g]", i == 0 ? "" : ", ", all[i].name.c_str(),
                all[i].at(0.5), all[i].at(0.25), all[i].at(0.75));
  }
  std::printf("}}\n");
  std::fflush(stdout);
}

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

struct Options {
  std::string workload;
  std::int64_t keys = 1000000;
  std::int64_t dim = 64;
  int reps = 9;
  std::uint64_t seed = 1;
};

inline Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const char* const value = argv[i + 1];
    if (name == "--workload")
      o.workload = value;
    else if (name == "--keys")
      o.keys = static_cast<std::int64_t>(std::atof(value));
    else if (name == "--dim")
      o.dim = std::atoll(value);
    else if (name == "--reps")
      o.reps = std::atoi(value);
    else if (name == "--seed")
      o.seed = static_cast<std::uint64_t>(std::atoll(value));
    else
      fail("unknown option " + std::string(name));
  }
  return o;
}

inline std::string count_text(std::int64_t n) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0e", static_cast<double>(n));
  std::string out(text);
  out.erase(std::remove(out.begin(), out.end(), '+'), out.end());
  const auto zero = out.find("e0");
  if (zero != std::string::npos) out.erase(zero + 1, 1);
  return out;
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

// Ranks by a power law of exponent 1.05: the inverse of the continuous distribution function.
inline std::uint64_t zipf_rank(std::mt19937_64& random, std::uint64_t count) {
  constexpr double kExponent = 1.05;
  const double u = std::uniform_real_distribution<double>()(random);
  const double top = std::pow(static_cast<double>(count), 1.0 - kExponent);
  const double x = std::pow(1.0 + u * (top - 1.0), 1.0 / (1.0 - kExponent));
  return std::min<std::uint64_t>(static_cast<std::uint64_t>(x) - 1, count - 1);
}

}  // namespace recsdk::bench
