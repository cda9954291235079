// An index: from a raw 64-bit key to a row number, for rows that may lie anywhere.
//
// A Table is an index with rows. A program that keeps rows itself, on a device, in another process
// or in another framework, uses an Index alone: see examples/own_rows.cc and .c.
//
// Shape letters: N keys, n keys that a call inserts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "recsdk/error.h"
#include "recsdk/export.h"
#include "recsdk/join_rows.h"
#include "recsdk/leavers.h"
#include "recsdk/policy.h"
#include "recsdk/types.h"

namespace recsdk {

namespace internal {
class RowNumbers;
}

/// What happens to a call that would need more than `max_rows` rows.
enum class OnFull : std::uint8_t {
  /// the keys that find no room are kRefused: in each group the lowest by a fixed hash, with
  /// eviction those of the call's new keys that would leave first
  kRefuse = 0,
  kRaise = 1,  ///< the call throws Error(kCapacity) and changes nothing
};

/// What an index is made of.
struct IndexConfig {
  std::string name = "index";                             ///< for messages; not empty
  std::optional<std::uint64_t> hash_seed = std::nullopt;  ///< random if absent; alters no result
  /// >= 0, of keys, see on_full; absent: no limit. Row numbers may lie beyond it while leases keep
  /// back rows of keys that left.
  std::optional<std::int64_t> max_rows = std::nullopt;
  /// Groups of keys that have an equal part of max_rows each, a power of two up to max_rows and
  /// kNumVirtualShards; 1: only the whole counts. Absent: default_eviction_groups(max_rows).
  std::optional<std::int64_t> eviction_groups = std::nullopt;
  /// The groups whose keys may come, if others have the rest; absent: all.
  std::optional<GroupRange> owned_groups = std::nullopt;
  OnFull on_full = OnFull::kRefuse;
  std::optional<int> num_threads = std::nullopt;  ///< >= 1, of its calls; absent: the pool's size
  /// Who leaves when a group is full, so that on_full concerns only keys for which nobody may
  /// leave, and which keys expire; needs max_rows unless keys expire. Absent: nobody does. A cut of
  /// an index alone has keys and rows, and nothing of what eviction keeps of them.
  std::optional<EvictConfig> eviction = std::nullopt;
  /// Which new keys get a row; those kept out are kNotAdmitted. Absent: all do. Eviction's remark
  /// on cuts of an index alone holds here too.
  std::optional<AdmitConfig> admission = std::nullopt;
  /// Groups of keys that admission's max_records divides over, a power of two up to max_records and
  /// kNumVirtualShards, all of them here; for an index whose max_rows is the memory of its rows and
  /// no limit on keys. Absent: those of max_rows, and without it as AdmitConfig says.
  std::optional<std::int64_t> record_groups = std::nullopt;
  /// What `map` says in place of the row number of a key without a row: with kSharedRows which of
  /// these rows it reads, with kInitialRow the key itself, else nothing.
  DefaultConfig default_row = {};
};

/// Cumulative counts of keys by outcome, and sizes of an index.
struct IndexStats {
  std::int64_t num_rows = 0;            ///< keys visible to readers, each of which has a row
  std::int64_t num_rows_in_flight = 0;  ///< keys that readers do not see yet
  /// Of these, keys of batches that have ended, but wait for one of an earlier step that has not.
  std::int64_t num_rows_held_back = 0;
  std::uint64_t outcomes[kNumOutcomes] = {};  ///< keys by Outcome, over all calls (visible batches)
  std::uint64_t erased = 0;                   ///< keys taken out by erase and clear
  std::uint64_t evicted = 0;                  ///< keys that left for others, or by evict
  std::uint64_t expired = 0;                  ///< keys that left since they were not seen for long
  /// Keys that got a row again within EvictConfig::churn_steps of leaving. Erased keys, and those
  /// from before a restore, are not among them; exact while churn_lost is 0, else at least so many.
  std::uint64_t returned = 0;
  std::uint64_t churn_lost = 0;        ///< keys that were forgotten within churn_steps
  std::int64_t admission_records = 0;  ///< keys without a row whose count is kept
  std::uint64_t records_lost = 0;      ///< counts of keys that left for others
  std::int64_t index_bytes = 0;        ///< memory from keys to row numbers
  std::int64_t metadata_bytes = 0;     ///< memory of what is kept per row number
  std::int64_t tracking_bytes = 0;     ///< memory of what tells changes since the last cut
  std::int64_t index_slots = 0;        ///< key slots of the hashed part of the index
  std::int64_t index_segments = 0;     ///< its parts, each of which grows by itself
  std::int64_t index_crowded = 0;      ///< segments of keys that collide under the hash seed
  std::int64_t index_directory = 0;    ///< entries of the directory
  std::uint64_t index_splits = 0;      ///< segments split so far
  std::int64_t index_overflowed = 0;   ///< hashed keys that lie outside their home bucket
  std::int64_t index_probes = 0;       ///< buckets read if every hashed key is looked up once
  std::int64_t index_dense_keys = 0;   ///< keys of dense ranges, which are mapped directly
  std::int64_t index_dense_pages = 0;  ///< ranges of 2048 keys that are mapped directly
};

/// A batch in flight. While a lease lives
///  - rows of keys erased meanwhile are not given to other keys, and
///  - if it carries a step, the keys inserted under it are seen by later batches, but not by
///    readers (lookup, size, export, stats): they become visible when it and all earlier leases
///    with a step are released, whether the batch was trained or abandoned.
/// Leases with a step must be taken in the order of their steps, of which some may be equal
/// (checked), and their batches mapped in that order (checked with eviction or admission, else the
/// caller's duty: insertions are decided as calls come). Movable; releases itself when destroyed.
/// May outlive the index or table that it was taken from. May be released from any thread, also
/// while another call uses it: that call then either is part of the batch or throws
/// std::invalid_argument.
class RECSDK_API Lease {
 public:
  Lease() noexcept = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  /// Ends the batch. Idempotent. Waits for no call that holds the index, unless somebody reads what
  /// leaves it (`leavers`) or new rows begin with shared ones (BeginWith::kSharedRow), and never
  /// within a callback of the index: whoever calls next finds the batch ended.
  void release() noexcept;
  /// True too of a lease that was never taken, or moved from.
  bool is_released() const noexcept;
  /// The batch's step; absent if it has none, or was released.
  std::optional<std::int64_t> step() const noexcept;

  struct Impl;

 private:
  friend class Index;
  std::shared_ptr<Impl> impl_;
};

/// What comes with the keys of a call that inserts. Of the times and scores of equal keys the
/// largest counts; counts and clicks are added up.
struct KeyData {
  /// (N,) or one for all; absent: `now`, else Index::time's. Only by EvictClock::kTime, which needs
  /// them. Later ones than Index::time's move that on, unless `now` is given. kNoTime: none is
  /// known, and the key keeps what it has.
  std::span<const std::int64_t> times = {};
  /// (N,), finite; only by EvictOrder::kScore. Absent: keys keep their score, new ones have 0.
  std::span<const float> scores = {};
  /// (N,) or one for all, >= 1: how many occurrences each stands for to admission, and to
  /// EvictOrder::kShowClick and kShowClickTotals; absent: 1. Only with one of them.
  std::span<const std::int64_t> counts = {};
  /// (N,) or one for all, >= 0: how often each was clicked. Only with AdmitTerm::Kind::kShowClick
  /// or kShowClickOfStep, EvictOrder::kShowClick or kShowClickTotals. Absent: 0, but calls that
  /// insert under a rule whose beta is above 0 need them, if they do not admit all.
  std::span<const std::int64_t> clicks = {};
  /// Only by EvictClock::kTime: Index::time's from this call on, if it succeeds. Readers do not see
  /// it before the call's batch ends. Keys that expire in the call do so by it. Not kNoTime.
  std::optional<std::int64_t> now = std::nullopt;
};

/// What a call of `map` does, and for which batch.
struct MapOptions {
  bool insert = false;           ///< give unseen keys a row
  const Lease* lease = nullptr;  ///< the batch this call belongs to; null: visible at once
  KeyData data = {};             ///< only with insert
  /// No rule of admission keeps keys out, as of Table::upsert; only with insert, and without a
  /// lease that has a step.
  bool admits_all = false;
};

/// Keys that a call is about to insert, and the row numbers that they get.
class RECSDK_API NewRows {
 public:
  NewRows(const internal::RowNumbers& numbers, std::span<const std::uint32_t> rows,
          bool are_in_flight) noexcept
      : numbers_(numbers), rows_(rows), are_in_flight_(are_in_flight) {}

  std::int64_t size() const noexcept { return static_cast<std::int64_t>(rows_.size()); }
  /// Distinct row numbers (n,).
  std::span<const std::uint32_t> rows() const noexcept { return rows_; }
  /// Whether a batch with a step brings the keys, so that readers do not see them yet.
  bool are_in_flight() const noexcept { return are_in_flight_; }
  /// Copies the keys of rows()[begin] and those after it to `keys`, which it fills: `begin` and
  /// their number add up to size() at most.
  void copy_keys(std::int64_t begin, std::span<Key> keys) const noexcept;

 private:
  const internal::RowNumbers& numbers_;
  std::span<const std::uint32_t> rows_;
  bool are_in_flight_;
};

/// Makes the rows of an index's new keys. Called under the index's lock, so it must not call the
/// index (Error(kBusy)), by the thread that inserts; in map_indexes that is one of the pool. A
/// maker for several indexes may be called for them at the same time. What it throws takes the
/// insertion back.
class RECSDK_API RowMaker {
 public:
  RowMaker() = default;
  RowMaker(const RowMaker&) = delete;
  RowMaker& operator=(const RowMaker&) = delete;
  virtual ~RowMaker();

  /// Called before keys are inserted, perhaps several times for a call. They will get rows below
  /// `end`; of rows that had another key before, only those in `reused`. By default does nothing.
  virtual void prepare(RowNumber end, std::span<const std::uint32_t> reused);
  /// Gives new rows their initial values, before anybody else knows their keys.
  virtual void make(const NewRows& added) = 0;
  /// Whether `check` is to be called; by default not.
  virtual bool checks() const { return false; }
  /// Called with the keys of a call that get no row, before the call is done, under
  /// DefaultKind::kInitialRow: what they read is to be made of them later. What it throws takes the
  /// call back, so that no call is counted whose keys cannot be read. By default does nothing.
  virtual void check(std::span<const Key> keys);
  /// Called before readers see rows that were made for a batch with a step, by the thread that
  /// ends the batch. By default does nothing.
  virtual void show(std::span<const std::uint32_t> rows) noexcept;
  /// Whether `norms` may be called; by default not, and EvictOrder::kLowNorm is refused.
  virtual bool has_norms() const { return false; }
  /// The norms (n,) of rows (n,), ascending; by default throws std::logic_error. Called before
  /// keys are inserted, while no batch of a step before is in flight.
  virtual void norms(std::span<const std::uint32_t> rows, std::span<float> norms) const;
};

/// The keys of an index at one moment: all of them, or those that came and left since the last cut
/// that was finished as durable. Reading it needs no lock. Movable; finishes itself as not durable
/// when destroyed. May be read and finished from any thread.
class RECSDK_API IndexCut {
 public:
  IndexCut(IndexCut&& other) noexcept;
  IndexCut& operator=(IndexCut&& other) noexcept;
  ~IndexCut();

  bool changes_only() const noexcept;
  /// Keys (n,) in ascending order of row number: all visible ones, or with changes_only those that
  /// came, came again, or were named by note_changed.
  std::span<const Key> keys() const noexcept;
  /// Their rows (n,), as of the cut: once its key leaves, a row may be given to another one.
  std::span<const RowNumber> rows() const noexcept;
  /// Keys that left and are not there again, ascending; none unless changes_only.
  std::span<const Key> left() const noexcept;
  /// Why each of them left (m,).
  std::span<const LeaveCause> causes() const noexcept;

  /// Ends the cut. Durable: changes are counted from the cut on. Else it is as if it had never
  /// been: what had changed before still counts as changed. If memory for that runs out, tracking
  /// ends, and the next cut must be of all keys. Only the first call counts.
  void finish(bool durable) noexcept;

  struct Impl;

 private:
  friend class Index;
  explicit IndexCut(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// A growing map from raw keys to row numbers.
///
/// Row numbers are given in input order, from 0 on; those of keys that left are given again, the
/// one freed last first. They never change while their key is there.
///
/// Thread safety: every method may be called from any thread. Reads run side by side; insertion and
/// erasure exclude everything else. A call that throws has changed nothing but spare capacity. Fork
/// while no other thread is inside a call of the index: else the child finds it locked by a thread
/// that it does not have, and waits for ever.
class RECSDK_API Index {
 public:
  /// `maker` makes new rows; null: the caller does, and sees by the outcomes which are new.
  /// Throws std::invalid_argument for a bad config. Cost: no memory until the first insertion.
  explicit Index(IndexConfig config, std::shared_ptr<RowMaker> maker = nullptr);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index();

  const IndexConfig& config() const noexcept;

  /// Opens a batch. Throws std::invalid_argument if `step` is below that of a lease taken before.
  Lease lease(std::optional<std::int64_t> step = std::nullopt);

  /// Finds the rows of keys (N,), and with options.insert gives a row to each unseen one.
  /// rows (N,) and outcomes (N,) are written; of a key without a row see
  /// IndexConfig::default_row.
  /// Of a new key that occurs several times the first is kInserted, the rest kFound. Row numbers
  /// are given in input order. Which keys find no room depends on the call's keys and not on their
  /// order, see OnFull. Empty input is fine.
  /// Throws std::invalid_argument for arrays, options or a lease that do not fit; Error(kBusy) when
  /// inserting without a step while leases with a step are open, or at a look of
  /// EvictOrder::kLowNorm while those of steps before are; Error(kCapacity) under OnFull::kRaise,
  /// Error(kOutOfMemory), what OnOverflow says while somebody reads what leaves, and what the maker
  /// throws. Cost: one cache line per key, plus one row per insertion.
  void map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
           const MapOptions& options = {});

  /// Takes keys (N,) out. The first of duplicates is kFound, the rest kMissing. A row is given to
  /// another key only when no lease taken before is open. outcomes (N,) may be empty. Throws
  /// Error(kBusy) while leases with a step are open. What admission counts of them by key is
  /// forgotten, also of those without a row.
  void erase(std::span<const Key> keys, std::span<Outcome> outcomes = {});

  /// Removes every key, and forgets all that admission has counted. The clock goes on. Same
  /// conditions as erase.
  void clear();

  /// Makes room: evicts until each group has at most its part of `max_rows`, which is divided as
  /// that of the config. Keys below min_age stay. Returns how many left. Throws
  /// std::invalid_argument without eviction or for a negative number; conditions as erase.
  std::int64_t evict(std::int64_t max_rows);
  /// Makes the keys leave that have expired by now, rather than at the next look. Returns how many.
  /// Throws std::invalid_argument unless keys expire; conditions as erase. Cost: a look at each
  /// key.
  std::int64_t expire();
  /// Sets the time, for EvictClock::kTime; it may be an earlier one. Saves have it once the batches
  /// that are in flight have ended. Throws std::invalid_argument by another clock, and for kNoTime.
  void set_time(std::int64_t time);
  /// By which keys expire, and which keys have that come without one: what was set last, or a call
  /// has brought as its `now`, or a later one that has come with keys since; absent: none was.
  std::optional<std::int64_t> time() const;

  /// Reads which keys leave from now on, and where their rows are, see recsdk/leavers.h: `take`
  /// them, copy the rows before they get other keys' values, and `free` their places. A maker that
  /// is given their numbers again sees by Leavers::num_ended that they have left. One at a time.
  /// Throws Error(kBusy) while another one is open or leases with a step are, std::invalid_argument
  /// for a bad option, or if the index is a table's.
  Leavers leavers(const LeaversOptions& options);

  /// Replaces all keys by distinct keys (N,), which get the rows 0 to N - 1; the maker prepares
  /// them, and makes none. To rules they are keys that were never seen, counts of keys without a
  /// row are forgotten, and the clock begins anew; see assign_with_metadata. Changes are tracked
  /// from here on. Throws Error(kBusy) while leases or a cut are open, Error(kCapacity) beyond
  /// max_rows or what a group has of it, std::invalid_argument if a key comes twice or the index is
  /// a table's: the index is then as it was.
  void assign(std::span<const Key> keys);
  /// Throws Error(kBusy) while leases or a cut are open, so that keys and rows cannot be replaced.
  void check_idle() const;

  /// Number of visible keys.
  std::int64_t size() const;
  /// One past the highest row number that was ever given.
  RowNumber end_row() const noexcept;
  /// Cost: looks at every segment.
  IndexStats stats() const;
  /// Copies visible keys with row number >= begin, at most as many as `keys` and `rows` have room
  /// for, in ascending order of row number; returns how many, and sets `begin` to where to go on.
  /// Fewer than there is room for means the end. Keys that come or leave between two calls may or
  /// may not be seen. Throws std::invalid_argument for a negative `begin`, and unless there is room
  /// for 1 key or more and as many rows.
  std::int64_t export_keys(RowNumber& begin, std::span<Key> keys, std::span<RowNumber> rows) const;

  /// The keys as they are now, or with `changes_only` what came and left since the last durable
  /// cut or assign, from which on changes are tracked: a bit per row, and the keys that leave.
  /// Cost: a look at a bit per row, and a copy of these keys. Throws Error(kBusy) while a cut is
  /// open, and std::invalid_argument if changes_only without a durable cut or an assign before, or
  /// if the index is a table's.
  IndexCut cut(bool changes_only = false);
  /// True if a cut may be of changes only.
  bool is_tracking() const;
  /// Adds the keys of these rows (n,), where they have one, to those that the next cut of changes
  /// names. Does nothing before the first durable cut. Throws std::invalid_argument for a row
  /// number out of range.
  void note_changed(std::span<const RowNumber> rows);

  /// Makes room for `num_rows` keys in all and backs it with memory now: insertions up to there
  /// wait for no memory and, from a small index on, move no keys. Cost: clearing that memory, and a
  /// move of the keys that are there. Throws std::invalid_argument for a negative number,
  /// Error(kOutOfMemory) if the system has less memory than that, Error(kCapacity) for more rows
  /// than there can be.
  void reserve(std::int64_t num_rows);

  /// Throws Error(kInternal) naming the first broken invariant. Cost: reads the whole index.
  void check_invariants() const;

  struct Impl;

 private:
  friend struct IndexAccess;
  struct Adopt {};
  Index(Adopt, std::shared_ptr<Impl> impl) noexcept;
  std::shared_ptr<Impl> impl_;
};

/// Keys of a call that lie side by side there, and where their numbers go.
struct NumberedKeys {
  std::int64_t begin = 0;  ///< of the numbers
  std::int64_t count = 0;
};

/// Where the row numbers of a call's keys go as numbers of a store that has the rows of several
/// tables: what join_rows makes of them, without an array between.
struct StoreNumbers {
  /// One of the two is given, (M,). Calls of other indexes may write to other parts of the same.
  std::span<std::int32_t> narrow;
  std::span<std::int64_t> wide;
  /// All keys of the call, one part after the other. No two parts may overlap, of any calls.
  std::span<const NumberedKeys> parts;
  StorePlace
      place;  ///< num_shared: as many as the index says with DefaultKind::kSharedRows, else 0
};

/// One index's part of a call over many indexes.
struct IndexMapCall {
  Index* index = nullptr;
  std::span<const Key> keys;
  std::span<RowNumber> rows;  ///< none with `store`
  std::span<Outcome> outcomes;
  MapOptions options = {};
  /// Where the keys lie if not side by side: one piece after the other. Then `keys` is empty.
  // With an initializer it may be left out without a warning of missing ones.
  // NOLINTNEXTLINE(readability-redundant-member-init)
  std::span<const std::span<const Key>> pieces = {};
  /// Where row numbers are written in place of `rows`; null: there.
  // NOLINTNEXTLINE(readability-redundant-member-init)
  const StoreNumbers* store = nullptr;
};

/// Index::map of many indexes at once, spread over the thread pool; an index may occur once. All
/// arguments are checked before any index changes. An index either has its part done whole or is
/// unchanged; the first error is thrown after the others have ended. With a `store` an index whose
/// row numbers go further than its numbers can say throws std::invalid_argument too.
RECSDK_API void map_indexes(std::span<const IndexMapCall> calls);

}  // namespace recsdk
