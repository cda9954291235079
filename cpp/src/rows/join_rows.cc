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
#include "rows/store_numbers.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {
namespace {

constexpr std::size_t kKeysOfPiece = 16384;

/// Keys of one part that lie side by side, as a part of its own.
struct Piece {
  MappedRows keys;
  std::size_t place;  // of its first number in the result
};

/// `count` items from `begin` on, unless there are none at all.
template <typename Item>
std::span<const Item> part_of(std::span<const Item> items, std::size_t begin, std::size_t count) {
  return items.empty() ? items : items.subspan(begin, count);
}

std::vector<Piece> pieces_of(std::span<const MappedRows> parts, std::size_t size) {
  std::vector<Piece> pieces;
  std::size_t place = 0;
  for (const MappedRows& part : parts) {
    const std::size_t num_rows = part.rows.size() + part.narrow_rows.size();
    if (!part.rows.empty() && !part.narrow_rows.empty())
      throw std::invalid_argument("join_rows: a part has rows and narrow_rows; pass one of them");
    if (!part.outcomes.empty() && part.outcomes.size() != num_rows)
      throw std::invalid_argument("join_rows: " + internal::must_fit_keys("the outcomes of a part",
                                                                          num_rows,
                                                                          part.outcomes.size()));
    for (std::size_t begin = 0; begin < num_rows; begin += kKeysOfPiece) {
      const std::size_t count = std::min(kKeysOfPiece, num_rows - begin);
      pieces.push_back({{part_of(part.rows, begin, count), part_of(part.outcomes, begin, count),
                         part.place, part_of(part.narrow_rows, begin, count)},
                        place + begin});
    }
    place += num_rows;
  }
  if (place != size)
    throw std::invalid_argument("join_rows: " + internal::must_fit_keys("out", place, size));
  return pieces;
}

/// Returns whether all numbers fit.
template <typename Number>
bool write(const MappedRows& keys, Number* out) {
  if (keys.narrow_rows.empty())
    return internal::write_store_numbers(keys.rows, keys.outcomes, keys.place, out);
  return internal::write_store_numbers(keys.narrow_rows, keys.outcomes, keys.place, out);
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
