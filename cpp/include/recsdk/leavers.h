// What leaves a table, for whoever wants to read it: keys, why they left, and their rows as they
// were last. Of an index, whose rows are the caller's, it says where these are. Nothing is kept,
// and nothing is paid, while nobody reads.
//
// Shape letters: n rows that a call reads, D row width, S numbers of a row's state.
#pragma once

#include <cstdint>
#include <memory>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// Why a key left.
enum class LeaveCause : std::uint8_t {
  kEvicted = 0,  ///< for another one, or by evict
  kErased = 1,   ///< by erase or clear
  kExpired = 2,  ///< since it was not seen for long
};

/// What happens when more rows leave than there are places for those yet to be read.
enum class OnOverflow : std::uint8_t {
  kCount = 0,  ///< those that find none are lost, and counted
  /// the call waits until they are read; so does every other call that writes or looks for keys.
  /// Throws Error(kCapacity) at once where reading cannot give it enough places
  kBlock = 1,
  kRaise = 2,  ///< the call throws Error(kCapacity) and changes nothing
};

struct LeaversOptions {
  std::int64_t max_rows = 65'536;  ///< places, >= 1; memory for their rows is reserved at once
  OnOverflow on_overflow = OnOverflow::kCount;
  double block_seconds = 60.0;  ///< > 0: with kBlock a call that waits longer throws Error(kBusy)
};

/// Where rows that left go; any of the arrays but `keys` may be null.
struct LeaversBuffer {
  std::int64_t capacity = 0;
  Key* keys = nullptr;           ///< (capacity,)
  LeaveCause* causes = nullptr;  ///< (capacity,)
  float* weights = nullptr;      ///< (capacity, D); of an index D is 0
  float* state = nullptr;        ///< (capacity, S); of an index S is 0
  RowNumber* rows = nullptr;     ///< (capacity,): the number that each row had
};

/// Keys that leave a table from the moment on at which this was taken, see Table::leavers. A row
/// can be read once no batch in flight uses it, so with what that batch's update gave it. Keys that
/// leave when all are replaced, as by a restore, are not among them. Movable; closes itself when
/// destroyed. May outlive the table. Thread-safe. Other threads may fork meanwhile.
class RECSDK_API Leavers {
 public:
  Leavers(Leavers&& other) noexcept;
  Leavers& operator=(Leavers&& other) noexcept;
  Leavers(const Leavers&) = delete;
  Leavers& operator=(const Leavers&) = delete;
  ~Leavers();

  const LeaversOptions& options() const noexcept;
  /// Takes the rows that left first, in the order in which they left; returns how many. Throws
  /// std::invalid_argument unless the buffer has a capacity of 1 or more and room for keys.
  std::int64_t read(const LeaversBuffer& buffer);
  /// As `read`, but their places stay taken until `free_rows`: for an index, whose caller copies
  /// the rows. A call that needs places waits for these only, not for keys that are yet to be
  /// taken: taking may wait for that call.
  std::int64_t take(const LeaversBuffer& buffer);
  /// Gives back so many of the places that `take` has left taken; all if there are fewer.
  void free_rows(std::int64_t count) noexcept;
  /// Rows that could be read so far, those that were included. The number of a row that was counted
  /// may be given to another key; a RowMaker that makes rows sees by this which rows left before,
  /// and may call it.
  std::uint64_t num_ended() const;
  /// Waits until a row can be read, this is closed, the table is gone, or so many seconds have
  /// passed; returns whether one can be read. Throws std::invalid_argument for a negative number.
  bool wait(double seconds) const;
  /// Rows that can be read now.
  std::int64_t size() const;
  /// Rows that found no place so far.
  std::uint64_t num_lost() const;
  /// From here on what leaves is not kept; what has left can still be read. Idempotent. Calls that
  /// wait for places go on.
  void close() noexcept;

  struct Impl;

 private:
  friend class Index;
  friend class Table;
  explicit Leavers(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace recsdk
