// Whether arrays of a call lie apart.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
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

struct Overlap {
  CallArray written;
  CallArray other;
};

/// An array that is written and lies over one that is read, or over another one that is written;
/// absent: there is none. Changes the order of `written`. Cost: a sort of it, and a search in it
/// for each that is read.
std::optional<Overlap> find_overlap(std::vector<CallArray>& written,
                                    std::span<const CallArray> read);

/// "rows lie over its keys; pass arrays of their own", or of two calls "rows lie over keys of table
/// 'b'; ...", whose `other_title` names the table.
inline std::string must_lie_apart(const Overlap& found, const std::string& other_title) {
  const bool is_own = found.written.call == found.other.call;
  return std::string(found.written.name) + " lie over " + (is_own ? "its " : "") +
         found.other.name + (is_own ? "" : " of " + other_title) + "; pass arrays of their own";
}

}  // namespace recsdk::internal
