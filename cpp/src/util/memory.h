// Memory from the operating system: anonymous pages, huge where it pays.
//
// Random access to big arrays is bound by address translation, so everything big asks for huge
// pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace recsdk::internal {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// The start of the first huge page at or behind `offset`, in memory that is aligned to huge pages.
inline constexpr std::size_t next_huge_page(std::size_t offset) {
  return (offset + kHugePage - 1) / kHugePage * kHugePage;
}

/// Called with a number of bytes before so many are taken as pages; it may throw. For fault
/// injection in tests.
using PageAllocationHook = void (*)(std::size_t bytes);
void set_page_allocation_hook(PageAllocationHook hook) noexcept;

/// Bytes that the system could give without swapping, as it estimates; absent if it does not say.
std::optional<std::uint64_t> available_memory();

/// Makes the system back whole pages with memory now, not at first touch; false if it cannot.
bool populate_pages(std::byte* first, std::size_t bytes) noexcept;

/// Zeroed pages that nobody has touched yet; the destructor gives them back.
class Pages {
 public:
  Pages() noexcept = default;
  /// Regions of a huge page or more are aligned to huge pages. Bytes before `huge_from` and from
  /// `huge_to` on stay on small pages, so that little data costs little memory. Throws
  /// Error(kOutOfMemory).
  Pages(std::size_t bytes, std::size_t huge_from, std::size_t huge_to = SIZE_MAX);
  Pages(Pages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  /// Has [begin, end), which nobody has touched yet, on huge pages, too. Best effort.
  void ask_for_huge_pages(std::size_t begin, std::size_t end) const noexcept;
  /// Makes the system back [begin, end) with memory now, not at first touch. Best effort.
  void populate(std::size_t begin, std::size_t end) const noexcept;
  /// Gives the memory from `begin` on back to the system: its content is lost, and zero at the next
  /// touch. `begin` is rounded up to a page.
  void discard(std::size_t begin) const noexcept;

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace recsdk::internal
