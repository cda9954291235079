#include "recsdk/join_rows.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/runtime.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::int64_t kKeysOfPiece = 16384;

/// Keys of one part that lie side by side, as a part of its own.
struct Piece {
  MappedRows keys;
  std::size_t place;  // of its first number in the result
};

std::vector<Piece> pieces_of(std::span<const MappedRows> parts, std::size_t size) {
  std::vector<Piece> pieces;
  std::size_t place = 0;
  for (const MappedRows& part : parts) {
    const bool has_outcomes = !part.outcomes.empty();
    if (has_outcomes && part.outcomes.size() != part.rows.size())
      throw std::invalid_argument("join_rows: a part has " + std::to_string(part.rows.size()) +
                                  " rows and " + std::to_string(part.outcomes.size()) +
                                  " outcomes; pass one for each key");
    for (std::size_t begin = 0; begin < part.rows.size(); begin += kKeysOfPiece) {
      const std::size_t count = std::min<std::size_t>(kKeysOfPiece, part.rows.size() - begin);
      MappedRows keys = part;
      keys.rows = part.rows.subspan(begin, count);
      if (has_outcomes) keys.outcomes = part.outcomes.subspan(begin, count);
      pieces.push_back({keys, place + begin});
    }
    place += part.rows.size();
  }
  if (place != size)
    throw std::invalid_argument("join_rows: there is room for " + std::to_string(size) +
                                " numbers; pass room for " + std::to_string(place));
  return pieces;
}

/// Of a key without a row; negative if the part has no such row.
std::int64_t default_of(const MappedRows& keys, RowNumber number) {
  if (keys.num_shared == 0) return keys.default_row;
  const bool is_one = number >= 0 && number < keys.num_shared;
  return is_one ? keys.default_row + number : -1;
}

/// Returns whether all numbers fit.
template <typename Number>
bool write(const MappedRows& keys, Number* out) {
  std::uint64_t bits = 0;
  const bool has_outcomes = !keys.outcomes.empty();
  for (std::size_t i = 0; i < keys.rows.size(); ++i) {
    const bool is_there = !has_outcomes || has_row(keys.outcomes[i]);
    const std::int64_t row =
        is_there ? keys.rows[i] + keys.first_row : default_of(keys, keys.rows[i]);
    bits |= static_cast<std::uint64_t>(row);
    out[i] = static_cast<Number>(row);
  }
  return bits <= static_cast<std::uint64_t>(std::numeric_limits<Number>::max());
}

template <typename Number>
void join(std::span<const MappedRows> parts, std::span<Number> out) {
  const std::vector<Piece> pieces = pieces_of(parts, out.size());
  std::atomic<bool> all_fit = true;
  internal::parallel_for(static_cast<std::int64_t>(pieces.size()), 1, num_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t i = begin; i < end; ++i) {
                             const Piece& piece = pieces[static_cast<std::size_t>(i)];
                             if (!write(piece.keys, out.data() + piece.place)) all_fit = false;
                           }
                         });
  if (!all_fit)
    throw std::invalid_argument("join_rows: row numbers must be 0 to " +
                                std::to_string(std::numeric_limits<Number>::max()) +
                                ", and of shared rows below num_shared; pass int64 for a larger "
                                "store");
}

}  // namespace

void join_rows(std::span<const MappedRows> parts, std::span<std::int32_t> out) { join(parts, out); }

void join_rows(std::span<const MappedRows> parts, std::span<std::int64_t> out) { join(parts, out); }

}  // namespace recsdk
