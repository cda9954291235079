#include "recsdk/columns.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "util/hash.h"
#include "util/must.h"
#include "util/prefetch.h"
#include "util/streaming.h"

namespace recsdk {
namespace {

// Rows of a group stay in the first level of cache while they are put in order, and so does the
// line that each group is being filled at.
constexpr std::int64_t kRowsOfGroup = 2048;
constexpr std::int64_t kMostGroups = 256;
constexpr std::size_t kPiece = 16;
// Such a row is about a line, of which copying it twice makes no better use.
constexpr std::int64_t kBytesOfWideRow = 32;
constexpr std::size_t kRowsAhead = 16;
constexpr std::int64_t kRowsAtOnce = 256;
constexpr std::int64_t kFloatsOfLine = 16;
constexpr std::int64_t kBytesOfId = 8;
// Columns of so many rows leave the second level of cache before somebody reads them.
constexpr std::size_t kRowsToStream = 1 << 14;
constexpr std::uint32_t kExponent = 0x7F800000U;

/// Of the second level of cache of a core; 0 where the system does not say.
std::int64_t second_level_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const std::int64_t bytes = std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE));
  return bytes;
#else
  return 0;
#endif
}

/// Whether a column of ids leaves half of the second level of cache to what it is gathered into:
/// then gathering it from there costs two thirds of two passes.
bool is_gathered(std::int64_t num_rows) {
  return num_rows <= second_level_bytes() / (2 * kBytesOfId);
}

/// Random bits of a row, by which it gets its group (the high ones) and its place in it.
std::uint64_t bits_of(std::uint64_t seed, std::uint64_t row) {
  return internal::mix64(seed + ((row + 1) * 0x9E3779B97F4A7C15U));
}

std::uint32_t below(std::uint64_t bits, std::uint64_t limit) {
  return static_cast<std::uint32_t>(((bits & 0xFFFFFFFFU) * limit) >> 32);
}

std::vector<std::uint8_t> groups_of_rows(std::size_t num_rows, std::uint64_t seed,
                                         std::uint64_t num_groups) {
  std::vector<std::uint8_t> groups(num_rows);
  for (std::size_t row = 0; row < num_rows; ++row)
    groups[row] = static_cast<std::uint8_t>(below(bits_of(seed, row) >> 32, num_groups));
  return groups;
}

/// Source: R. Durstenfeld, "Algorithm 235: Random permutation", CACM 1964.
void shuffle(std::span<std::uint32_t> places, std::uint64_t seed, std::size_t first) {
  for (std::size_t i = places.size(); i > 1; --i)
    std::swap(places[i - 1], places[below(bits_of(seed, first + i - 1), i)]);
}

std::int64_t sum(std::span<const std::int64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
}

void check_rows(std::span<const std::int64_t> rows, const char* what) {
  for (const std::int64_t each : rows) {
    if (each < 0)
      throw std::invalid_argument(
          internal::must("shuffling: the rows of a " + std::string(what), "be 0 or more", each));
  }
}

std::string number_of_parts(std::size_t num_parts, std::size_t num_stretches) {
  return internal::counted(num_parts, "part") + " and " + std::to_string(num_stretches) +
         (num_stretches == 1 ? " stretch" : " stretches");
}

void check_column(const ShuffledColumn& column, std::size_t num_parts, std::size_t num_stretches) {
  if (column.row_bytes < 1)
    throw std::invalid_argument(
        internal::must("shuffling: row_bytes of a column", "be 1 or more", column.row_bytes));
  if (column.parts.size() != num_parts || column.stretches.size() != num_stretches)
    throw std::invalid_argument(
        internal::must("shuffling: a column",
                       "have " + number_of_parts(num_parts, num_stretches) + ", as the rows have",
                       number_of_parts(column.parts.size(), column.stretches.size())));
}

/// In pieces of 16 bytes, of which the last may lie over the one before: faster than a call.
void copy_row(const std::byte* from, std::byte* to, std::size_t width) {
  if (width < kPiece) {
    std::memcpy(to, from, width);
    return;
  }
  const std::size_t last = width - kPiece;
  for (std::size_t at = 0; at < last; at += kPiece) std::memcpy(to + at, from + at, kPiece);
  std::memcpy(to + last, from + last, kPiece);
}

bool is_wide(const ShuffledColumn& column) { return column.row_bytes >= kBytesOfWideRow; }

/// What columns are put in order by.
struct Places {
  std::span<const std::uint32_t> of_row;    // after the first pass; empty: where it was
  std::span<const std::uint32_t> in_order;  // of the row that comes first, second and so on
  std::span<const std::int64_t> part_rows;
  std::span<const std::int64_t> stretch_rows;
};

/// Calls `visit(row of the column, its place)`. `width` is a number, or a constant of its own type.
template <typename Width, typename Visit>
void visit_rows(const ShuffledColumn& column, const Places& places, Width width, Visit visit) {
  std::size_t row = 0;
  for (std::size_t p = 0; p < places.part_rows.size(); ++p) {
    const auto* from = static_cast<const std::byte*>(column.parts[p]);
    for (std::int64_t i = 0; i < places.part_rows[p]; ++i, from += width, ++row)
      visit(from, places.of_row.empty() ? row : std::size_t{places.of_row[row]});
  }
}

/// The first pass.
template <typename Width>
void group_rows(const ShuffledColumn& column, const Places& places, std::byte* grouped,
                Width width) {
  if (!places.of_row.empty()) {
    visit_rows(column, places, width, [=](const std::byte* row, std::size_t place) {
      copy_row(row, grouped + (place * width), width);
    });
    return;
  }
  for (std::size_t p = 0; p < places.part_rows.size(); ++p) {
    const std::size_t bytes = static_cast<std::size_t>(places.part_rows[p]) * width;
    if (bytes > 0) std::memcpy(grouped, column.parts[p], bytes);
    grouped += bytes;
  }
}

/// Calls `write(number in the order, where that row goes)`.
template <typename Width, typename Write>
void write_rows(const ShuffledColumn& column, const Places& places, Width width, Write write) {
  std::size_t at = 0;
  for (std::size_t s = 0; s < places.stretch_rows.size(); ++s) {
    auto* out = static_cast<std::byte*>(column.stretches[s]);
    for (std::int64_t i = 0; i < places.stretch_rows[s]; ++i, out += width) write(at++, out);
  }
}

/// Two passes, first into groups or into cache. `copy(from, to)` copies a row in the second one.
template <typename Width, typename Copy>
void shuffle_narrow(const ShuffledColumn& column, const Places& places, std::byte* grouped,
                    Width width, Copy copy) {
  group_rows(column, places, grouped, width);
  const std::uint32_t* in_order = places.in_order.data();
  write_rows(column, places, width, [=](std::size_t at, std::byte* out) {
    copy(grouped + (std::size_t{in_order[at]} * width), out);
  });
}

template <typename Width>
void shuffle_narrow(const ShuffledColumn& column, const Places& places, std::byte* grouped,
                    Width width) {
  shuffle_narrow(column, places, grouped, width,
                 [width](const std::byte* from, std::byte* to) { copy_row(from, to, width); });
}

void shuffle_narrow(const ShuffledColumn& column, const Places& places, std::byte* grouped) {
  constexpr std::integral_constant<std::size_t, 8> kEight;
  if (column.row_bytes == kBytesOfId && places.in_order.size() >= kRowsToStream)
    shuffle_narrow(column, places, grouped, kEight, [](const std::byte* from, std::byte* to) {
      internal::stream_8_bytes(from, to);
    });
  else if (column.row_bytes == kBytesOfId)
    shuffle_narrow(column, places, grouped, kEight);
  else if (column.row_bytes == 4)
    shuffle_narrow(column, places, grouped, std::integral_constant<std::size_t, 4>());
  else
    shuffle_narrow(column, places, grouped, static_cast<std::size_t>(column.row_bytes));
}

/// Each row once, asked for in time; only their addresses go through the groups.
void shuffle_wide(const ShuffledColumn& column, const Places& places, const std::byte** addresses) {
  const auto width = static_cast<std::size_t>(column.row_bytes);
  visit_rows(column, places, width,
             [=](const std::byte* row, std::size_t place) { addresses[place] = row; });
  const std::span<const std::uint32_t> in_order = places.in_order;
  write_rows(column, places, width, [=](std::size_t at, std::byte* out) {
    const std::byte* next = addresses[in_order[std::min(at + kRowsAhead, in_order.size() - 1)]];
    internal::prefetch_line(next);
    internal::prefetch_line(next + width - 1);
    copy_row(addresses[in_order[at]], out, width);
  });
}

bool is_finite(const float* numbers, std::int64_t count) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(numbers[i]);
    bad |= static_cast<std::uint32_t>((bits & kExponent) == kExponent);
  }
  return bad == 0;
}

}  // namespace

Shuffle::Shuffle(std::int64_t num_rows, std::uint64_t seed) {
  if (num_rows < 0 || num_rows > std::numeric_limits<std::uint32_t>::max())
    throw std::invalid_argument(
        internal::must("shuffling: num_rows", "be 0 to 2**32 - 1", num_rows));
  const auto size = static_cast<std::size_t>(num_rows);
  const auto num_groups = static_cast<std::uint64_t>(
      std::clamp((num_rows + kRowsOfGroup - 1) / kRowsOfGroup, std::int64_t{1}, kMostGroups));
  const std::vector<std::uint8_t> groups = groups_of_rows(size, seed, num_groups);
  std::array<std::uint32_t, kMostGroups + 1> starts{};
  for (const std::uint8_t group : groups) ++starts[group + std::size_t{1}];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  place_in_order_.resize(size);
  std::iota(place_in_order_.begin(), place_in_order_.end(), 0U);
  for (std::size_t group = 0; group < num_groups; ++group)
    shuffle(std::span(place_in_order_).subspan(starts[group], starts[group + 1] - starts[group]),
            seed, starts[group]);
  place_of_row_.resize(size);
  for (std::size_t row = 0; row < size; ++row) place_of_row_[row] = starts[groups[row]]++;
  if (!is_gathered(num_rows)) return;
  place_in_order_ = rows_in_order();
  std::vector<std::uint32_t>().swap(place_of_row_);  // an empty list would only clear it
}

std::vector<std::uint32_t> Shuffle::rows_in_order() const {
  std::vector<std::uint32_t> order = place_in_order_;
  if (place_of_row_.empty()) return order;
  std::vector<std::uint32_t> rows(order.size());
  for (std::size_t row = 0; row < rows.size(); ++row)
    rows[place_of_row_[row]] = static_cast<std::uint32_t>(row);
  for (std::uint32_t& each : order) each = rows[each];
  return order;
}

void Shuffle::write_order(std::span<std::int64_t> order) const {
  if (order.size() != place_in_order_.size())
    throw std::invalid_argument(internal::must(
        "shuffling: order", "have one element per row, " + std::to_string(place_in_order_.size()),
        order.size()));
  std::ranges::copy(rows_in_order(), order.begin());
}

void Shuffle::write(std::span<const std::int64_t> part_rows,
                    std::span<const std::int64_t> stretch_rows, std::int64_t skip,
                    std::span<const ShuffledColumn> columns) const {
  check_rows(part_rows, "part");
  check_rows(stretch_rows, "stretch");
  const std::string as_shuffled = "be those that were shuffled, " + std::to_string(num_rows());
  if (sum(part_rows) != num_rows())
    throw std::invalid_argument(
        internal::must("shuffling: the rows of all parts", as_shuffled, sum(part_rows)));
  if (skip < 0)
    throw std::invalid_argument(internal::must("shuffling: skip", "be 0 or more", skip));
  if (sum(stretch_rows) != num_rows() - skip)
    throw std::invalid_argument(
        internal::must("shuffling: skip and the rows of all stretches", as_shuffled,
                       std::to_string(skip) + " and " + std::to_string(sum(stretch_rows))));
  std::int64_t most_bytes = 0;
  for (const ShuffledColumn& column : columns) {
    check_column(column, part_rows.size(), stretch_rows.size());
    if (!is_wide(column)) most_bytes = std::max(most_bytes, column.row_bytes);
  }
  const auto size = place_in_order_.size();
  const auto grouped =
      std::make_unique_for_overwrite<std::byte[]>(size * static_cast<std::size_t>(most_bytes));
  const auto addresses = std::make_unique_for_overwrite<const std::byte*[]>(
      std::ranges::any_of(columns, is_wide) ? size : 0);
  const Places places{place_of_row_,
                      std::span(place_in_order_).subspan(static_cast<std::size_t>(skip)), part_rows,
                      stretch_rows};
  for (const ShuffledColumn& column : columns) {
    if (is_wide(column))
      shuffle_wide(column, places, addresses.get());
    else
      shuffle_narrow(column, places, grouped.get());
  }
  internal::finish_streams();
}

bool interleave(std::span<const float* const> columns, std::int64_t num_rows, float* matrix) {
  const auto width = static_cast<std::int64_t>(columns.size());
  bool all_finite = true;
  for (std::int64_t begin = 0; begin < num_rows; begin += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, num_rows - begin);
    const std::int64_t next = std::min(kRowsAtOnce, num_rows - begin - count);
    for (std::int64_t c = 0; c < width; ++c) {
      const float* const from = columns[static_cast<std::size_t>(c)] + begin;
      float* const to = matrix + (begin * width) + c;
      // The processor itself looks ahead within a column only.
      for (std::int64_t i = 0; i < next; i += kFloatsOfLine)
        internal::prefetch_line(from + count + i);
      for (std::int64_t i = 0; i < count; ++i) to[i * width] = from[i];
      all_finite = is_finite(from, count) && all_finite;
    }
  }
  return all_finite;
}

}  // namespace recsdk
