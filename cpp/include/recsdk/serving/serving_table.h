// Frozen tables: rows by raw 64-bit keys, read only, mapped from files. Link recsdk_serving, which
// has none of what trains.
//
// Shape letters: N keys, B bags, D row width, W shards.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "recsdk/error.h"
#include "recsdk/export.h"
#include "recsdk/serving/frozen.h"
#include "recsdk/types.h"

namespace recsdk {

/// Bags of raw keys.
struct ServingBags {
  std::span<const Key> keys;  ///< (N,)
  /// (B + 1,), from 0 to N; empty: a bag per key, B = N
  std::span<const std::int64_t> offsets = {};
  std::span<const float> weights = {};  ///< (N,) or empty
  Pooling pooling = Pooling::kSum;

  std::int64_t num_bags() const {
    return static_cast<std::int64_t>(offsets.empty() ? keys.size() : offsets.size() - 1);
  }
};

/// Where the vectors of some bags go, and what became of their keys.
struct ServingBlock {
  ServingBags bags;
  float* out = nullptr;              ///< bag b to out[b * stride], D floats
  std::int64_t stride = 0;           ///< in floats, >= D
  std::span<Outcome> outcomes = {};  ///< (N,) or empty
};

struct ServingCall;

class ServingDelta;

/// A table that is only read: one frozen file a shard, mapped into memory, and the deltas that it
/// has taken since.
///
/// Opening reads a header a file, so it takes the same time whatever the size. Processes that open
/// the same files share their pages. Rows are read with bounds checked, so a damaged file gives
/// wrong numbers at worst; `verify` compares all bytes with their checksums. A file must not be
/// changed or cut short while it is open: replace it by a rename.
///
/// Thread safety: every method may be called from any thread and at once, but for `take`, which one
/// thread calls at a time; reads take no lock, wait for nobody and allocate nothing. A call that
/// throws has changed nothing; its outputs may be written in part.
class RECSDK_API ServingTable {
 public:
  /// Opens the files of one table in any order: all W shards, or some of them, and then a key of
  /// another shard is refused. Throws Error(kCheckpoint), which names file and reason, for a file
  /// that is missing, cut short, damaged in its header, or of another table;
  /// std::invalid_argument for no file, or the same shard twice.
  explicit ServingTable(std::span<const std::string> files);
  ~ServingTable();
  ServingTable(ServingTable&&) noexcept;
  ServingTable& operator=(ServingTable&&) noexcept;

  /// What the files say, whatever deltas came since.
  const FrozenInfo& info() const noexcept;
  /// Number of rows, with the deltas that were taken.
  std::int64_t size() const noexcept;
  /// Deltas taken since the table was opened.
  std::int64_t num_deltas() const noexcept;
  /// Bytes of memory that they take now.
  std::int64_t delta_bytes() const noexcept;
  /// Whether all W shards are open.
  bool is_whole() const noexcept;

  /// Reads every byte and compares it with its checksum. Throws Error(kCheckpoint) naming file and
  /// part.
  void verify() const;
  /// Has the system read all files into memory, so that no later call waits for a disk. What it
  /// cannot do is left out.
  void preload() const noexcept;

  /// Copies the rows of keys (N,) to values (N, D) as float32; a missing key reads the default
  /// value, or the shared row that FrozenInfo::num_shared gives it. outcomes (N,) may be empty:
  /// kFound or kMissing. Throws std::invalid_argument for arrays that do not fit, or of which one
  /// that is written lies over another, and for a key whose shard is not open.
  void lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes = {}) const;

  /// Pools bags, with the sums of Table::pool, bit for bit; of int8 and int4 rows, steps times
  /// scale and biases are added apart, with the error that docs/reference/frozen.md states. An
  /// empty bag gives zeros. Mean divides by the number of keys of the bag, weighted mean by the sum
  /// of its weights (0 gives zeros). A missing key adds what lookup reads of it. Throws as lookup.
  void pool(const ServingBlock& block) const;

  /// Puts a delta in front of what the table has, whole or not at all. A call of `lookup` or `pool`
  /// reads before it or after it, never both; those that begin when it has returned read after it.
  /// Keys of shards that are not open are left out. The delta can be taken again, or by another
  /// table of the same files.
  ///
  /// Cost: sorting the delta, and a copy of it; from time to time all rows that deltas have brought
  /// are copied as well, a few megabytes at a time, which takes no more memory than that. It waits
  /// until calls that read what it replaces have ended. Throws std::invalid_argument for a delta of
  /// another table, for a key that is in it twice, for some but not all shared rows, and while
  /// another thread takes one; std::bad_alloc.
  void take(const ServingDelta& delta);

 private:
  friend class ServingDelta;
  friend RECSDK_API void pool_serving(std::span<const ServingCall> calls);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What changed since a version of a table: rows that are new or differ, and keys that left.
/// Not thread-safe.
class RECSDK_API ServingDelta {
 public:
  /// For the table, and others that are opened from the same files. It may be closed meanwhile.
  explicit ServingDelta(const ServingTable& table);
  ~ServingDelta();
  ServingDelta(ServingDelta&&) noexcept;
  ServingDelta& operator=(ServingDelta&&) noexcept;

  /// Adds rows (N, D) of keys (N,), stored as the table's, by quantize_row. Throws
  /// std::invalid_argument for a row that the dtype cannot hold, which names its key; then none of
  /// the call is added.
  void add(std::span<const Key> keys, const float* weights);
  /// Adds shared rows (m, D), each under a key (m,) that reads it, as recsdk::shared_row_key: all
  /// of the table's over all calls, or none, and then they stay as they are. Throws as `add`, and
  /// for a row that came before.
  void add_shared(std::span<const Key> keys, const float* weights);
  /// Adds keys (N,) that have left; one that the table lacks is nothing.
  void erase(std::span<const Key> keys);
  /// Rows added so far.
  std::int64_t num_rows() const noexcept;
  /// Keys erased so far.
  std::int64_t num_erased() const noexcept;

  struct Impl;

 private:
  friend class ServingTable;
  std::unique_ptr<Impl> impl_;
};

/// Bags of one table within a call over many.
struct ServingCall {
  const ServingTable* table = nullptr;
  ServingBlock block;
};

/// ServingTable::pool over many tables, one after the other on this thread. All calls are checked
/// before the first is read. Each call reads one version of its table.
RECSDK_API void pool_serving(std::span<const ServingCall> calls);

/// The shard of a key: floor(v * num_shards / 65536) of its virtual shard v. For routers.
RECSDK_API std::int64_t serving_shard(Key key, std::int64_t num_shards);

}  // namespace recsdk
