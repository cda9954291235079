#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "streams.h"

namespace npusim {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kMostWaste = 4096;
constexpr int kPoison = 0xFF;  // NaN as floating point, -1 as an index

struct Block {
  void* data = nullptr;
  std::size_t size = 0;
  c10::Stream owner;
  std::vector<c10::Stream> users{};
};

struct Deferred {
  Block* block;
  std::vector<Mark> marks;
};

std::size_t rounded(std::size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

/// Bytes of text such as 256M or 2G; 0: no limit.
std::size_t limit_of_environment() {
  const char* text = std::getenv("RECSDK_SIM_NPU_MEMORY");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  const std::string unit(end);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : unit.empty() ? 0 : -1;
  TORCH_CHECK(shift >= 0 && number > 0, "RECSDK_SIM_NPU_MEMORY must be a number with K, M or G, ",
              "such as 256M; got '", text, "'");
  return static_cast<std::size_t>(number) << shift;
}

std::string in_mib(std::size_t bytes) {
  return std::to_string(static_cast<double>(bytes) / (1 << 20)) + " MiB";
}

void poison(const Block& block) {
  if (!is_async() || block.size == 0) return;
  const Range range{block.data, block.size};
  run_or_push(block.owner, range,
              [range, data = block.data] { std::memset(data, kPoison, range.size); });
}

class Pool {
 public:
  Block* take(std::size_t size, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    release_deferred();
    Block* block = reuse(size, stream);
    if (block == nullptr) block = make(size, stream);
    MemoryCounts& counts = counts_[stream.device_index()];
    counts.allocated += block->size;
    counts.peak = std::max(counts.peak, counts.allocated);
    return block;
  }

  void give(Block* block) {
    const std::lock_guard lock(mutex_);
    counts_[block->owner.device_index()].allocated -= block->size;
    if (!is_async() || block->users.empty()) {
      release(block);
      return;
    }
    Deferred deferred{block, {}};
    for (c10::Stream user : block->users) deferred.marks.push_back(mark(user));
    deferred_.push_back(std::move(deferred));
  }

  void record(Block* block, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    if (stream != block->owner) block->users.push_back(stream);
  }

  MemoryCounts counts(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    MemoryCounts found = counts_[device];
    found.limit = limit_;
    return found;
  }

  void reset_peak(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    counts_[device].peak = counts_[device].allocated;
  }

  void empty_cache() {
    const std::lock_guard lock(mutex_);
    free_all();
  }

 private:
  using Free = std::multimap<std::size_t, Block*>;
  using Name = std::pair<c10::DeviceIndex, c10::StreamId>;

  static Name name_of(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

  void release(Block* block) {
    block->users.clear();
    poison(*block);
    free_[name_of(block->owner)].emplace(block->size, block);
  }

  void release_deferred() {
    const auto is_free = [](const Deferred& entry) {
      return std::all_of(entry.marks.begin(), entry.marks.end(), is_reached);
    };
    for (const Deferred& entry : deferred_) {
      if (is_free(entry)) release(entry.block);
    }
    std::erase_if(deferred_, [](const Deferred& entry) { return entry.block->users.empty(); });
  }

  Block* reuse(std::size_t size, c10::Stream stream) {
    Free& free = free_[name_of(stream)];
    const auto found = free.lower_bound(size);
    if (found == free.end() || found->first > size + std::max(size / 4, kMostWaste)) return nullptr;
    Block* block = found->second;
    free.erase(found);
    return block;
  }

  Block* make(std::size_t size, c10::Stream stream) {
    const c10::DeviceIndex device = stream.device_index();
    if (is_over_limit(device, size)) free_all();
    TORCH_CHECK_WITH(OutOfMemoryError, !is_over_limit(device, size), "NPU out of memory. Tried to ",
                     "allocate ", in_mib(size), " on npu:", static_cast<int>(device), ", where ",
                     in_mib(counts_[device].allocated), " of ", in_mib(limit_), " are in use");
    void* data = std::aligned_alloc(kAlignment, std::max(size, kAlignment));
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "the host has no memory for ", in_mib(size),
                     " of the simulated NPU");
    auto* block = new Block{data, size, stream};
    poison(*block);
    counts_[device].reserved += size;
    return block;
  }

  bool is_over_limit(c10::DeviceIndex device, std::size_t size) {
    return limit_ != 0 && counts_[device].reserved + size > limit_;
  }

  void free_all() {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) synchronize_device(device);
    release_deferred();
    // What release_deferred queued must have run before its memory goes.
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) synchronize_device(device);
    for (auto& [name, free] : free_) {
      for (auto& [size, block] : free) {
        counts_[name.first].reserved -= size;
        std::free(block->data);
        delete block;
      }
      free.clear();
    }
  }

  std::mutex mutex_;
  const std::size_t limit_ = limit_of_environment();
  std::map<Name, Free> free_;
  std::vector<Deferred> deferred_;
  std::map<c10::DeviceIndex, MemoryCounts> counts_;
};

Pool& pool() {
  static auto* made = new Pool;
  return *made;
}

void give_back(void* context) { pool().give(static_cast<Block*>(context)); }

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    const c10::Stream stream = current_stream(current_device());
    const c10::Device device = stream.device();
    if (size == 0) return {nullptr, nullptr, &give_nothing_back, device};
    Block* block = pool().take(rounded(size), stream);
    return {block->data, block, &give_back, device};
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    drain_current_stream(current_device());
    default_copy_data(dest, src, count);
  }

 private:
  static void give_nothing_back(void*) {}
};

/// Pinned memory: which ranges are in use, and what was given back. As in torch's own host
/// allocators it is kept, in sizes that are powers of two: pinning takes longer than using.
class Pinned {
 public:
  void* take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& kept = kept_[room_of(size)];
    void* data = nullptr;
    if (kept.empty()) {
      data = std::aligned_alloc(kAlignment, room_of(size));
    } else {
      data = kept.back();
      kept.pop_back();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr, "no memory for ", in_mib(size), " to pin");
    ranges_.emplace(static_cast<const char*>(data), std::max<std::size_t>(size, 1));
    return data;
  }

  void give(void* data) {
    const std::lock_guard lock(mutex_);
    const auto range = ranges_.find(static_cast<const char*>(data));
    if (is_async()) std::memset(data, kPoison, range->second);
    kept_[room_of(range->second)].push_back(data);
    ranges_.erase(range);
  }

  bool has(const void* data) {
    const auto* wanted = static_cast<const char*>(data);
    const std::lock_guard lock(mutex_);
    auto next = ranges_.upper_bound(wanted);
    if (next == ranges_.begin()) return false;
    --next;
    return wanted < next->first + next->second;
  }

 private:
  static std::size_t room_of(std::size_t size) { return std::bit_ceil(std::max(size, kAlignment)); }

  std::mutex mutex_;
  std::map<const char*, std::size_t> ranges_;
  std::map<std::size_t, std::vector<void*>> kept_;
};

Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    void* data = pinned().take(size);
    return {data, data, &give_pinned_back, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_pinned_back; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static void give_pinned_back(void* data) { pinned().give(data); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* made = new DeviceAllocator;
  return made;
}

c10::Allocator* pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}

bool is_pinned(const void* data) { return pinned().has(data); }

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_deleter() != &give_back) return;
  pool().record(static_cast<Block*>(data.get_context()), stream);
}

MemoryCounts memory_counts(c10::DeviceIndex device) {
  return pool().counts(device < 0 ? current_device() : device);
}

void reset_peak(c10::DeviceIndex device) {
  pool().reset_peak(device < 0 ? current_device() : device);
}

void empty_cache() { pool().empty_cache(); }

}  // namespace npusim
