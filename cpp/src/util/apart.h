// Whether arrays of a call lie apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace recsdk::internal {

/// Memory that a call writes or reads: one stretch of bytes, or several at equal distances. Of
/// calls over many, `call` says which of them.
struct CallArray {
  template <typename Item>
  CallArray(const char* name_of_array, std::span<Item> items, std::size_t number_of_call = 0)
      : begin(reinterpret_cast<std::uintptr_t>(items.data())),
        end(begin + items.size_bytes()),
        bytes(items.size_bytes()),
        name(name_of_array),
        call(number_of_call) {}

  /// `count` vectors of `width` numbers, the next `stride` >= width numbers after the one before,
  /// as far as any array reaches.
  CallArray(const char* name_of_array, const float* first, std::int64_t width, std::int64_t stride,
            std::int64_t count, std::size_t number_of_call = 0)
      : begin(reinterpret_cast<std::uintptr_t>(first)),
        end(begin),
        bytes(static_cast<std::uintptr_t>(width) * sizeof(float)),
        name(name_of_array),
        call(number_of_call) {
    if (count <= 0) return;
    const std::uintptr_t distance = static_cast<std::uintptr_t>(stride) * sizeof(float);
    end += (static_cast<std::uintptr_t>(count) - 1) * distance + bytes;
    if (count > 1 && stride > width)
      step = distance;
    else
      bytes = end - begin;
  }

  bool is_empty() const { return begin == end; }
  std::uintptr_t num_stretches() const { return (end - begin - bytes) / step + 1; }
  /// Whether the two have a byte in common. Cost: constant if one of them is one stretch.
  bool lies_over(const CallArray& other) const;

  static constexpr std::uintptr_t kAlone = PTRDIFF_MAX;  // further than any array reaches

  std::uintptr_t begin;          // addresses
  std::uintptr_t end;            // of the last stretch
  std::uintptr_t bytes;          // of a stretch
  std::uintptr_t step = kAlone;  // from one stretch to the next
  const char* name;              // "rows"
  std::size_t call;
};

/// Rows (N, width); null: none.
inline CallArray rows_of(const char* name, const float* first, std::size_t num_rows,
                         std::int64_t width) {
  const std::size_t size = first == nullptr ? 0 : num_rows * static_cast<std::size_t>(width);
  return {name, std::span(first, size)};
}

/// Throws std::invalid_argument if what is written lies over one of the other arrays of the call.
/// `title()` names in the message whose they are; called only then.
template <typename Title>
void require_apart(const CallArray& written, std::initializer_list<CallArray> others,
                   const Title& title) {
  for (const CallArray& other : others) {
    if (written.lies_over(other))
      throw std::invalid_argument(title() + ": " + written.name + " lie over its " + other.name +
                                  "; pass arrays of their own");
  }
}

struct Overlap {
  CallArray written;
  CallArray other;

  /// "table 'a': rows lie over keys of table 'b'; pass arrays of their own". `title(i)` names whose
  /// the arrays of call i are.
  template <typename Title>
  std::string message(const Title& title) const {
    const bool is_own = written.call == other.call;
    std::string text = title(written.call) + ": ";
    text.append(written.name).append(" lie over ");
    const bool is_alike = std::string_view(written.name) == other.name;
    if (is_own) text.append(is_alike ? "others of its " : "its ");
    text.append(other.name);
    if (!is_own) text.append(" of ").append(title(other.call));
    return text + "; pass arrays of their own";
  }
};

/// An array that is written and lies over one that is read, or over another one that is written;
/// absent: there is none. Cost: a sort of what is written, and a search in it for each that is
/// read; one more sort where arrays of several stretches lie between one another. Those of
/// different distances are then compared in pairs.
std::optional<Overlap> find_overlap(std::span<const CallArray> written,
                                    std::span<const CallArray> read);

/// Sees at little cost that arrays lie apart where those of a name come in the order in which they
/// lie, as slices of one array do, or as columns of one matrix from left to right. Takes no memory.
class ArrayRuns {
 public:
  void add_written(const CallArray& array);
  void add_read(const CallArray& array);

  /// Whether nothing that is written lies over another array; false: that is not known.
  bool are_apart() const;

 private:
  struct Run {
    const char* name;
    bool is_written;
    std::uintptr_t begin;
    std::uintptr_t end;
    std::uintptr_t step;          // of its last arrays, which are columns of one matrix
    std::uintptr_t columns_end;   // of the last one's first stretch
    std::uintptr_t columns_last;  // where these columns end at most
  };

  Run* find(const char* name, bool is_written);
  void begin_run(const CallArray& array, bool is_written);

  static constexpr std::size_t kMostRuns = 8;

  std::array<Run, kMostRuns> runs_;
  std::size_t num_runs_ = 0;
  bool are_too_many_ = false;
};

/// Throws std::invalid_argument if there is one. `each_array(written, read)` calls these with each
/// array, more than once perhaps. `title` as of Overlap::message, called only then.
template <typename EachArray, typename Title>
void require_apart(const EachArray& each_array, const Title& title) {
  ArrayRuns runs;
  std::size_t num_written = 0;
  std::size_t num_read = 0;
  each_array([&](const CallArray& array) { runs.add_written(array), ++num_written; },
             [&](const CallArray& array) { runs.add_read(array), ++num_read; });
  if (runs.are_apart()) return;
  std::vector<CallArray> written;
  std::vector<CallArray> read;
  written.reserve(num_written);
  read.reserve(num_read);
  each_array([&](const CallArray& array) { written.push_back(array); },
             [&](const CallArray& array) { read.push_back(array); });
  if (const std::optional<Overlap> found = find_overlap(written, read))
    throw std::invalid_argument(found->message(title));
}

}  // namespace recsdk::internal
