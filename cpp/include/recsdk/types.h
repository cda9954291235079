// The words that every interface of the engine shares: keys, row numbers, outcomes, pooling.
//
// Shape letters used in this directory: N keys, B bags, D row width.
#pragma once

#include <cstdint>

namespace recsdk {

/// A raw 64-bit id. Every bit pattern is legal; none is reserved.
/// An unsigned 64-bit id is passed as the same 64 bits.
using Key = std::int64_t;

/// A fixed hash divides keys into this many virtual shards, see virtual_shard. Each group of
/// eviction, shared row and shard has a run of them, so there are at most as many of each.
inline constexpr std::int64_t kNumVirtualShards = 65'536;

/// Where a key's row lies in its table. Stable from insertion until the key leaves the table.
using RowNumber = std::int64_t;

/// What became of one key of one call.
enum class Outcome : std::uint8_t {
  kFound = 0,        ///< the key had a row
  kInserted = 1,     ///< the call gave the key a row
  kRefused = 2,      ///< the key has no row and found no room, see max_rows and OnFull
  kMissing = 3,      ///< the key has no row and the call does not insert
  kOverflowed = 4,   ///< a device cache could not hold the batch's row; nothing gives it yet
  kNotAdmitted = 5,  ///< the key has no row yet: the rule of admission kept it out
};

/// Number of values of Outcome.
inline constexpr int kNumOutcomes = 6;

/// True if the key has a row, so that its row number means something.
constexpr bool has_row(Outcome outcome) { return outcome <= Outcome::kInserted; }

/// How the rows of a bag become one vector.
enum class Pooling : std::uint8_t {
  kSum = 0,   ///< sum of the rows, each times its weight if there are weights
  kMean = 1,  ///< the sum over the number of keys of the bag, or over the sum of the weights
};

}  // namespace recsdk
