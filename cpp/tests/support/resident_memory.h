// What the system has given to this process, as it says itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>

#include "util/memory.h"

// An emulator has memory and page faults of its own, and so have the sanitizers, by their shadow
// memory.
#if !defined(RECSDK_TEST_EMULATED) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define RECSDK_TEST_SEES_ITS_MEMORY
#endif

namespace recsdk::test {

/// Memory of pages of any size.
struct ResidentMemory {
  std::size_t bytes = 0;
  std::size_t huge_bytes = 0;  // of these, on huge pages

  void add(const std::string& line, const std::string& name, std::size_t& sum) {
    if (line.starts_with(name)) sum += std::stoull(line.substr(name.size())) * 1024;
  }
  void add(const std::string& line) {
    add(line, "Anonymous:", bytes);
    add(line, "AnonHugePages:", huge_bytes);
  }
};

/// Of the whole process, without what it has of files.
inline ResidentMemory resident_memory() {
  std::ifstream file("/proc/self/smaps_rollup");
  ResidentMemory found;
  for (std::string line; std::getline(file, line);) found.add(line);
  return found;
}

/// Of the mappings of which a part lies in [begin, end).
inline ResidentMemory resident_between(const void* begin, const void* end) {
  std::ifstream file("/proc/self/smaps");
  ResidentMemory found;
  bool is_there = false;
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find('-');
    if (dash < line.find(' ')) {
      const auto first = static_cast<std::uintptr_t>(std::stoull(line, nullptr, 16));
      const auto last =
          static_cast<std::uintptr_t>(std::stoull(line.substr(dash + 1), nullptr, 16));
      is_there = first < reinterpret_cast<std::uintptr_t>(end) &&
                 last > reinterpret_cast<std::uintptr_t>(begin);
    }
    if (is_there) found.add(line);
  }
  return found;
}

/// Whether who asks for huge pages is given some.
inline bool has_huge_pages() {
  using internal::kHugePage;
  const internal::Pages pages(kHugePage, 0);
  *pages.data() = std::byte{1};
  return resident_between(pages.data(), pages.data() + kHugePage).huge_bytes != 0;
}

}  // namespace recsdk::test
