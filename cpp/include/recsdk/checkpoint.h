// Saving and restoring a table's rows while it is in use: cuts, and restores from row files.
//
// The Python package makes checkpoints of them: directories of row files with a manifest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/row_file.h"
#include "recsdk/table.h"

namespace recsdk {

/// What a cut holds, and how much memory it may take.
struct CutOptions {
  /// Only rows that changed, and keys that left, since the last durable cut or restore.
  bool changes_only = false;
  /// The most bytes of copies of rows that changed while the cut was open, >= 0; beyond it updates
  /// wait until more of the cut is read. An update that alone needs more goes on once all earlier
  /// copies are read. The memory taken for copies is up to 8 MiB more, see copied_bytes; heads of
  /// up to 31 bytes for each run of rows copied together count only once they are made. Absent: no
  /// limit.
  std::optional<std::int64_t> max_copy_bytes = std::nullopt;
};

/// A table's visible rows as they were at one moment, see Table::cut. While it is open, a row that
/// is about to change is copied first. Movable. The destructor finishes it as not durable.
///
/// Thread safety: prepare_copies and reading by one thread, everything else by any.
class RECSDK_API Cut {
 public:
  Cut(Cut&& other) noexcept;
  Cut& operator=(Cut&& other) noexcept;
  Cut(const Cut&) = delete;
  Cut& operator=(const Cut&) = delete;
  ~Cut();

  std::int64_t num_rows() const noexcept;
  /// Keys that left since the parent and are not there now; 0 unless changes_only.
  std::int64_t num_erased() const noexcept;
  bool changes_only() const noexcept;
  const RowLayout& layout() const noexcept;  ///< of the table
  std::uint64_t update_count() const noexcept;
  float learning_rate() const noexcept;
  double log_decay() const noexcept;
  /// The clock of eviction and admission, without batches in flight; absent: the table has neither.
  const std::optional<EvictionState>& eviction() const noexcept;
  /// How often keys without a row were seen, ascending by key, without batches in flight; absent:
  /// the table has no admission. Row files do not have them: save them beside, see add_records.
  const std::optional<std::vector<AdmitRecord>>& admission() const noexcept;
  /// The rows that keys without one share; absent: the table has none. Row files do not have them:
  /// save them beside, see add_shared.
  const std::optional<SharedRows>& shared_rows() const noexcept;
  /// Bytes of copies of rows that changed: held now, and the most held so far. Memory for them is
  /// taken in pieces of 256 KiB, up to 32 of which may be partly used, and up to 64 MiB ahead, as
  /// far as max_copy_bytes leaves room. When the cut is finished, the table keeps what Table::cut
  /// says is ready, at most max_copy_bytes; the rest is freed.
  std::int64_t copied_bytes() const noexcept;
  std::int64_t max_copied_bytes() const noexcept;
  bool is_finished() const noexcept;

  /// Readies what is missing of the memory that Table::cut keeps ready, so that updates need not
  /// wait for it; up to 32 MiB if there was no update yet. The thread that is to write the cut
  /// beside training calls it first; it pauses as in write_rows. Best effort.
  void prepare_copies() noexcept;

  /// Ends the cut and drops its copies. Durable: what it held is saved, and changes are tracked
  /// from the cut on. Not durable: what had changed before the cut still counts as changed. Only
  /// the first call counts. If memory for tracking runs out, tracking ends, and the next save must
  /// be full. Waits for a running update.
  void finish(bool durable) noexcept;

  struct Impl;

 private:
  friend class Table;
  friend struct CutAccess;
  explicit Cut(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// How a cut is written.
struct WriteOptions {
  /// Equal in all files of one save; each that a restore takes, snapshot or delta, has another.
  std::array<std::uint8_t, 16> token = {};
  RowFileOptions file = {};
  /// Called after each block with the bytes written so far; an exception from it ends the call.
  std::function<void(std::int64_t)> progress;
};

/// Writes what a cut holds: rows in ascending order of row number, then keys that left by cause,
/// and ascending among those of one cause. Equal cuts give equal bytes, whether or not the table
/// changed meanwhile. Holds at most 64 MiB beside 24 bytes per key that left. Updates wait for at
/// most one copy of about 1 MiB at a time; unless options.file.in_background, this thread pauses
/// while they run, up to four times as long as it works, and at first up to 100 ms. Call it once
/// per cut. It does not finish the cut, unless it fails: then the cut is finished as not durable.
/// Throws Error(kBusy) if the cut is finished meanwhile, std::invalid_argument for a finished or
/// written one, and what the sink throws.
RECSDK_API RowFileSummary write_rows(Cut& cut, ByteSink& sink, const WriteOptions& options = {});

/// Which keys of a file a restore keeps.
struct RestoreOptions {
  /// One element per virtual shard, kNumVirtualShards in all: not 0 keeps its keys. Empty: all.
  std::span<const std::uint8_t> owned = {};
  /// Keeps keys with uint64(key) % world == rank.
  struct Modulo {
    std::int64_t rank = 0;
    std::int64_t world = 1;
  };
  std::optional<Modulo> modulo = std::nullopt;
  /// Takes the weights only; every row gets the state of a new row.
  bool drop_state = false;
  /// Takes no metadata of eviction: keys are as if they had never been seen, and leave first.
  bool drop_metadata = false;
};

/// Fills a table from row files or from memory: stages rows beside it, then swaps. Until then the
/// table is unchanged. An empty table needs no more memory for this than it will have afterwards.
/// Not thread-safe by itself; the table may be used while rows are staged.
class RECSDK_API Restore {
 public:
  explicit Restore(const Table& table);
  Restore(Restore&&) noexcept;
  Restore& operator=(Restore&&) noexcept;
  ~Restore();

  /// Stages a file, reading it to its end. Snapshots, of one token, come first, then deltas, oldest
  /// first. Throws std::invalid_argument for options out of range, if the file was read before, or
  /// this Restore has failed or is committed; Error(kCheckpoint) if the file is damaged, its width,
  /// fields or types are not the table's, a key comes twice under one token, or a snapshot follows
  /// files of another token. After an error this Restore cannot be committed. Of metadata of
  /// eviction a file may have more than the table needs, or none, see drop_metadata;
  /// Error(kCheckpoint) if it has only some of them.
  void add_file(RowFileReader& file, const RestoreOptions& options = {});

  /// Stages rows of keys (N,) from memory, in place of files; fields[f] points to (N, C) elements
  /// of field f of fields(), or of "weight" alone if `drop_state`, which drops metadata too. May be
  /// called again for more. Throws as add_file.
  void add_rows(std::span<const Key> keys, std::span<const void* const> fields,
                const RestoreOptions& options = {});

  /// Stages how often keys without a row were seen, see Cut::admission; may be called again for
  /// more. Of groups that have too many those seen longest ago are left out. Throws
  /// std::invalid_argument without admission, or for a count below 1 or a key that comes twice;
  /// then this Restore cannot be committed.
  void add_records(std::span<const AdmitRecord> records);

  /// Stages rows that keys without one share: keys (m,), weights (m, D), and state (m, S) or null,
  /// which is a new row's. Those that are left out are as in a new table. Throws
  /// std::invalid_argument unless the table has such rows, for these keys.
  void add_shared(std::span<const Key> keys, const float* weights, const float* state);

  /// The fields that files, and rows in memory, must have.
  const std::vector<FileField>& fields() const;
  /// Rows staged so far; 0 once they are committed.
  std::int64_t num_rows() const;

  /// Replaces the table's rows by the staged ones, and its counts by these, which come from the
  /// same cut; changes are tracked from here on. Earlier row numbers are void. Call it once. Throws
  /// Error(kBusy) while leases or a cut are open, Error(kCapacity) if there are more rows than
  /// max_rows, and std::invalid_argument for counts that the table's setters refuse; the table is
  /// then unchanged. With eviction the lowest keys of groups that are too large leave first,
  /// whatever min_age says, and the clock becomes `state`, or begins anew.
  void commit(std::uint64_t update_count, double log_decay = 0.0, const EvictionState& state = {});
  /// Throws what commit would throw now. For several tables that must change together.
  void check(std::uint64_t update_count, double log_decay = 0.0) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace recsdk
