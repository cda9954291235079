#include "util/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

std::atomic<PageAllocationHook> g_hook{nullptr};

[[noreturn, gnu::cold]] void throw_out_of_memory(std::size_t bytes) {
  throw Error(ErrorCode::kOutOfMemory, "out of memory: the system gave no " +
                                           std::to_string(bytes) + " bytes (" +
                                           std::strerror(errno) + "); set max_rows or free memory");
}

std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::byte* map_pages(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw_out_of_memory(bytes);
  return static_cast<std::byte*>(address);
}

// Maps `bytes` at a multiple of a huge page by mapping more and giving the ends back.
std::byte* map_aligned(std::size_t bytes) {
  std::byte* const wide = map_pages(bytes + kHugePage);
  const auto address = reinterpret_cast<std::uintptr_t>(wide);
  const std::size_t head = round_up(address, kHugePage) - address;
  if (head > 0) munmap(wide, head);
  if (head < kHugePage) munmap(wide + head + bytes, kHugePage - head);
  return wide + head;
}

}  // namespace

void set_page_allocation_hook(PageAllocationHook hook) noexcept { g_hook.store(hook); }

std::optional<std::uint64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  for (std::uint64_t kibibytes = 0; file >> name >> kibibytes;
       file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return std::nullopt;
}

Pages::Pages(std::size_t bytes, std::size_t huge_from, std::size_t huge_to) {
  if (const PageAllocationHook hook = g_hook.load()) hook(bytes);
  size_ = round_up(bytes, bytes >= kHugePage ? kHugePage : 4096);
  data_ = size_ >= kHugePage ? map_aligned(size_) : map_pages(size_);
  ask_for_huge_pages(huge_from, huge_to);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, size_);
}

bool populate_pages(std::byte* first, std::size_t bytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
  // Since Linux 5.14; older kernels refuse it, and pages come at first touch.
  constexpr int kPopulateWrite = 23;
#endif
  return madvise(first, bytes, kPopulateWrite) == 0;
}

void Pages::ask_for_huge_pages(std::size_t begin, std::size_t end) const noexcept {
#ifdef MADV_HUGEPAGE
  // If the kernel refuses (it has no huge pages), only speed is lost.
  const std::size_t last = std::min(end, size_);
  if (begin < last) madvise(data_ + begin, last - begin, MADV_HUGEPAGE);
#endif
}

void Pages::populate(std::size_t begin, std::size_t end) const noexcept {
  const std::size_t first = begin / 4096 * 4096;
  const std::size_t last = round_up(end, 4096) < size_ ? round_up(end, 4096) : size_;
  if (first < last) populate_pages(data_ + first, last - first);
}

void Pages::discard(std::size_t begin) const noexcept {
  const std::size_t first = round_up(begin, 4096);
  if (first < size_) madvise(data_ + first, size_ - first, MADV_DONTNEED);
}

}  // namespace recsdk::internal
