// Saving and restoring a table's rows while it is in use: cuts, and restores from row files.
//
// What a directory of row files and a manifest makes a checkpoint is the Python package's part.
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

struct CutOptions {
  /// Only rows changed, and keys that left, since the last durable cut or restore.
  bool changes_only = false;
  /// The most bytes of rows copied because they changed while the cut was open, >= 0; beyond it
  /// updates wait until the cut has been read further. An update that alone needs more gets through
  /// once all copies made before are read. The memory taken for copies is up to 8 MiB more than
  /// that, see copied_bytes, and heads of up to 31 bytes for each run of rows copied together are
  /// counted only once they are made. Absent: no limit.
  std::optional<std::int64_t> max_copy_bytes;
};

/// A table's visible rows as they were at one moment, see Table::cut. While it is open, a row that
/// is about to change is copied first. Movable; finishes itself, not durable, when destroyed.
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
  std::uint64_t update_count() const noexcept;
  float learning_rate() const noexcept;
  double log_decay() const noexcept;
  /// Bytes of rows copied because they changed: held now, and the most held so far. Memory for them
  /// is taken in pieces of 256 KiB, up to 32 of which may be partly used, and up to 64 MiB ahead,
  /// as far as max_copy_bytes leaves room. When the cut is finished, what Table::cut says is
  /// ready, and no more than max_copy_bytes, stays with the table; the rest is freed.
  std::int64_t copied_bytes() const noexcept;
  std::int64_t max_copied_bytes() const noexcept;
  bool is_finished() const noexcept;

  /// Readies what is missing of the memory that Table::cut tells of, so that updates need not wait
  /// for it; if no update was seen yet, up to 32 MiB. For the thread that is to write the cut
  /// beside training, as the first that it does; it pauses as in write_rows. Best effort.
  void prepare_copies() noexcept;

  /// Ends the cut; its copies are void. Durable: what it held is saved, and changes are tracked
  /// from the cut on. Else it is as if it had never been: what had changed before counts as changed
  /// still. Only the first call counts. If memory for that runs out, tracking ends, and the next
  /// save must be a full one. Waits for a running update.
  void finish(bool durable) noexcept;

  struct Impl;

 private:
  friend class Table;
  friend struct CutAccess;
  explicit Cut(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct WriteOptions {
  std::array<std::uint8_t, 16> token = {};
  RowFileOptions file;
  /// Called after each block with the bytes written so far; what it throws ends the call.
  std::function<void(std::int64_t)> progress;
};

/// Writes what a cut holds, rows in ascending order of row number and erased keys in ascending
/// order: equal cuts give equal bytes, whether or not the table changed meanwhile. Holds at most 64
/// MiB beside 8 bytes per erased key. Updates wait for at most one copy of about 1 MiB at a time;
/// unless options.file.in_background, this thread pauses while they run, up to four times as long
/// as it works, and at first up to 100 ms. Once per cut. Does not finish the cut. Throws
/// Error(kBusy) if the cut is finished meanwhile, std::invalid_argument for a finished or written
/// one, and what the sink throws.
RECSDK_API RowFileSummary write_rows(Cut& cut, ByteSink& sink, const WriteOptions& options = {});

/// Which keys of a file a restore keeps.
struct RestoreOptions {
  /// By virtual shard, kNumVirtualShards elements: not 0 keeps its keys. Empty: all.
  std::span<const std::uint8_t> owned;
  /// Keeps keys with uint64(key) % world == rank.
  struct Modulo {
    std::int64_t rank = 0;
    std::int64_t world = 1;
  };
  std::optional<Modulo> modulo;
  /// Takes the weights alone and gives every row the state of a new one.
  bool drop_state = false;
};

/// Fills a table from row files, or from memory: stages rows beside it, then swaps. Until then the
/// table is as it was; a table that holds no rows needs no more memory for that than it will have.
/// Not thread-safe by itself; the table may be used while rows are staged.
class RECSDK_API Restore {
 public:
  explicit Restore(const Table& table);
  Restore(Restore&&) noexcept;
  Restore& operator=(Restore&&) noexcept;
  ~Restore();

  /// Stages a file, reading it to its end: first the snapshots, of one token, then deltas, oldest
  /// first. Throws std::invalid_argument if the file was read before, or this Restore has failed;
  /// Error(kCheckpoint) if the file is damaged, its width, fields or types are not the table's,
  /// a key comes twice under one token, or a snapshot follows files of another token.
  /// After an error this Restore cannot be committed.
  void add_file(RowFileReader& file, const RestoreOptions& options = {});

  /// Stages rows of keys (N,) from memory, in place of files; fields[f] points to (N, C) elements
  /// of field f of the table's layout, or of "weight" alone if `drop_state`. May be called again
  /// for more. Throws as add_file.
  void add_rows(std::span<const Key> keys, std::span<const void* const> fields,
                const RestoreOptions& options = {});

  /// The fields that files must have, and rows in memory.
  const std::vector<FileField>& fields() const;
  /// Rows staged so far; 0 once they are committed.
  std::int64_t num_rows() const;

  /// Gives the table the staged rows in place of its own, and these counts of the cut that they
  /// come from; changes are tracked from here on. Row numbers of before are void. Once. Throws
  /// Error(kBusy) while leases or a cut are open, Error(kCapacity) if there are more rows than
  /// max_rows, and std::invalid_argument for counts that the table's setters refuse; the table is
  /// then as it was.
  void commit(std::uint64_t update_count, double log_decay = 0.0);
  /// Throws what commit would throw now. For several tables that are to change together.
  void check(std::uint64_t update_count, double log_decay = 0.0) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace recsdk
