// Whether arrays of a call lie apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace recsdk::internal {

/// An array that a call writes or reads. Of calls over many, `call` says which of them.
struct CallArray {
  template <typename Item>
  CallArray(const char* name_of_array, std::span<Item> items, std::size_t number_of_call = 0)
      : begin(std::as_bytes(items).data()),
        end(begin + items.size_bytes()),
        name(name_of_array),
        call(number_of_call) {}

  bool is_empty() const { return begin == end; }
  /// Whether the two have a byte in common.
  bool lies_over(const CallArray& other) const {
    const std::less<const std::byte*> before;
    return !is_empty() && !other.is_empty() && before(begin, other.end) && before(other.begin, end);
  }

  const std::byte* begin;
  const std::byte* end;
  const char* name;  // "rows"
  std::size_t call;
};

/// Rows (N, width); null: none.
inline CallArray rows_of(const char* name, const float* first, std::size_t num_rows,
                         std::int64_t width) {
  const std::size_t size = first == nullptr ? 0 : num_rows * static_cast<std::size_t>(width);
  return {name, std::span(first, size)};
}

/// Vectors of `width` numbers that a call writes, the next `stride` numbers after the one before,
/// as far as any array reaches.
struct CallVectors {
  /// Whether one of them has a byte in common with the array.
  bool lies_over(const CallArray& other) const {
    if (other.is_empty() || count == 0) return false;
    const auto at = [](const void* place) { return reinterpret_cast<std::uintptr_t>(place); };
    const std::uintptr_t bytes = static_cast<std::uintptr_t>(width) * sizeof(float);
    const std::uintptr_t step = static_cast<std::uintptr_t>(stride) * sizeof(float);
    // The first that ends behind where the array begins.
    const std::uintptr_t end = at(first) + bytes;
    const std::uintptr_t number = at(other.begin) < end ? 0 : (at(other.begin) - end) / step + 1;
    return number < static_cast<std::uintptr_t>(count) && at(first) + number * step < at(other.end);
  }

  const char* name;
  const float* first;
  std::int64_t width;
  std::int64_t stride;  // >= width
  std::int64_t count;
};

/// "rows lie over keys of table 'b'; pass arrays of their own".
inline std::string must_lie_apart(const char* written, const std::string& other) {
  return std::string(written) + " lie over " + other + "; pass arrays of their own";
}

/// Throws std::invalid_argument if what is written lies over one of the other arrays of the call.
/// `title()` names in the message whose they are; called only then.
template <typename Written, typename Title>
void require_apart(const Written& written, std::initializer_list<CallArray> others,
                   const Title& title) {
  for (const CallArray& other : others) {
    if (written.lies_over(other))
      throw std::invalid_argument(title() + ": " +
                                  must_lie_apart(written.name, std::string("its ") + other.name));
  }
}

struct Overlap {
  CallArray written;
  CallArray other;
};

/// An array that is written and lies over one that is read, or over another one that is written;
/// absent: there is none. Changes the order of `written`. Cost: a sort of it, and a search in it
/// for each that is read.
std::optional<Overlap> find_overlap(std::vector<CallArray>& written,
                                    std::span<const CallArray> read);

}  // namespace recsdk::internal
