// A table: an index with rows, from a raw 64-bit key to a row of D weights and its optimizer state.
//
// Shape letters: N keys, B bags, D row width, S state width.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recsdk/error.h"
#include "recsdk/export.h"
#include "recsdk/index.h"
#include "recsdk/initializer.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"
#include "recsdk/types.h"

namespace recsdk {

/// What a table is made of. Only `dim` has no default.
struct TableConfig {
  std::int64_t dim = 0;        ///< D >= 1
  std::string name = "table";  ///< part of the identity of initial rows; not empty
  OptimizerConfig optimizer = {};
  InitializerConfig initializer = {};
  std::uint64_t seed = 0;                                 ///< drives initial rows, and nothing else
  std::optional<std::uint64_t> hash_seed = std::nullopt;  ///< random if absent; alters no result
  std::optional<std::int64_t> max_rows = std::nullopt;    ///< >= 0, see on_full; absent: no limit
  std::optional<std::int64_t> eviction_groups = std::nullopt;  ///< see IndexConfig
  std::optional<GroupRange> owned_groups = std::nullopt;       ///< see IndexConfig
  OnFull on_full = OnFull::kRefuse;
  /// What keys without a row read. kSharedRows takes memory for them at once. With kInitialRow a
  /// custom initializer is called by readers, too; it must not call the table.
  DefaultConfig default_row = {};
  NonFinite on_nonfinite = NonFinite::kApply;
  DType weight_dtype = DType::kFloat32;       ///< of stored rows; state and all calls are float32
  Rounding rounding = Rounding::kStochastic;  ///< of updates to 16-bit rows
  std::optional<int> num_threads = std::nullopt;  ///< >= 1, of its calls; absent: the pool's size
  std::optional<EvictConfig> eviction = std::nullopt;  ///< see IndexConfig
  /// See IndexConfig; of its salt the table's own is taken.
  std::optional<AdmitConfig> admission = std::nullopt;
};

/// The counts of an index, and those of the table's rows and updates. Reading them waits for a
/// running update, and looks at every segment of the index. tracking_bytes includes what is ready
/// for the next cut.
struct TableStats : IndexStats {
  std::uint64_t updates = 0;                 ///< t: optimizer updates so far, empty ones included
  std::uint64_t nonfinite = 0;               ///< rows whose summed gradient was not finite
  std::int64_t row_bytes = 0;                ///< memory of rows that were needed or reserved
  std::int64_t checkpoint_copied_bytes = 0;  ///< memory of rows copied for an open cut
  std::uint64_t checkpoint_waits = 0;  ///< times that an update waited for a cut to be read further
  double checkpoint_wait_seconds = 0.0;  ///< how long all of them took
};

/// The values of the rows that keys without one share.
struct SharedRows {
  std::vector<Key> keys;       ///< (n,), see shared_row_key
  std::vector<float> weights;  ///< (n, D)
  std::vector<float> state;    ///< (n, S)
};

class Cut;
struct CutOptions;
class Leavers;
struct LeaversOptions;

/// Bags of keys that were mapped before.
struct Bags {
  std::span<const RowNumber> rows;    ///< (N,)
  std::span<const Outcome> outcomes;  ///< (N,): a key without a row reads the default
  /// (B + 1,), from 0 to N; empty: a bag per key, B = N
  std::span<const std::int64_t> offsets = {};
  std::span<const float> weights = {};  ///< (N,) or empty
  Pooling pooling = Pooling::kSum;

  std::int64_t num_bags() const {
    return static_cast<std::int64_t>(offsets.empty() ? rows.size() : offsets.size() - 1);
  }
};

/// Bags of raw keys.
struct KeyBags {
  std::span<const Key> keys;  ///< (N,)
  /// (B + 1,), from 0 to N; empty: a bag per key, B = N
  std::span<const std::int64_t> offsets = {};
  std::span<const float> weights = {};  ///< (N,) or empty
  Pooling pooling = Pooling::kSum;

  std::int64_t num_bags() const {
    return static_cast<std::int64_t>(offsets.empty() ? keys.size() : offsets.size() - 1);
  }
};

/// Where the vectors of some bags go: bag b to out[b * stride], D floats.
struct PoolBlock {
  Bags bags;
  float* out = nullptr;
  std::int64_t stride = 0;  ///< in floats, >= D
};

/// Where the gradients of some bags come from: of bag b at grad[b * stride], D floats.
struct GradBlock {
  Bags bags;
  const float* grad = nullptr;
  std::int64_t stride = 0;        ///< in floats; >= D, or 0: all bags share one vector
  float* weights_grad = nullptr;  ///< (N,) or null: gradient of bags.weights
};

/// The largest p-norm that rows are to have.
struct NormLimit {
  double max_norm = 0.0;   ///< >= 0
  double norm_type = 2.0;  ///< p > 0; infinite: the largest size of a column
};

/// Learned values of up to `capacity` rows, in ascending order of row number.
struct ExportBuffer {
  std::int64_t capacity = 0;
  Key* keys = nullptr;       ///< (capacity,)
  float* weights = nullptr;  ///< (capacity, D) or null
  float* state = nullptr;    ///< (capacity, S) or null
};

/// A growing table of rows addressed by raw keys.
///
/// Thread safety: every method may be called from any thread. Reads run side by side; insertion
/// excludes other access to the index but not pool and update of rows already mapped.
/// A call that throws has changed nothing but spare capacity.
/// Fork while no other thread is inside a call of the table, background saves and readers of
/// leavers apart: else the child finds it locked by a thread that it does not have, and waits for
/// ever.
class RECSDK_API Table {
 public:
  /// Throws std::invalid_argument for a bad config. Cost: no memory until the first insertion.
  explicit Table(TableConfig config);
  ~Table();
  Table(Table&&) noexcept;
  Table& operator=(Table&&) noexcept;

  const TableConfig& config() const noexcept;
  const RowLayout& layout() const noexcept;
  /// The table's keys and row numbers. Index and table share map, lease, erase and clear. Lives as
  /// long as the table.
  Index& index() noexcept;
  const Index& index() const noexcept;

  /// As Index's. What a custom initializer throws takes an insertion back.
  Lease lease(std::optional<std::int64_t> step = std::nullopt);
  void map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
           const MapOptions& options = {});
  void erase(std::span<const Key> keys, std::span<Outcome> outcomes = {});
  void clear();  ///< of all keys; rows that keys without one share stay as they are
  std::int64_t evict(std::int64_t max_rows);
  void set_time(std::int64_t time);

  /// Reads what leaves from now on, see recsdk/leavers.h. One at a time. Throws
  /// std::invalid_argument for a bad option, Error(kBusy) while another one is open or leases with
  /// a step are. Cost: nothing until it is called; then a copy of each row that leaves.
  Leavers leavers(const LeaversOptions& options);

  /// Copies the rows of keys (N,) to values (N, D); a key without a row reads the default.
  /// outcomes (N,) may be empty; throws std::invalid_argument for any other size.
  void lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes = {}) const;

  /// map with insertion, then lookup; throws as they do.
  void find_or_insert(std::span<const Key> keys, float* values, std::span<Outcome> outcomes = {},
                      const Lease* lease = nullptr, const KeyData& data = {});

  /// Writes values (N, D) as the weights of keys (N,), inserting unseen ones, whatever a rule of
  /// admission says. Of duplicates the last wins. State (N, S) is written if given, else made
  /// fresh. Keys that find no room are kRefused and not written. Throws as Index::map; Error(kBusy)
  /// while leases with a step are open.
  void upsert(std::span<const Key> keys, const float* values, const float* state = nullptr,
              std::span<Outcome> outcomes = {}, const KeyData& data = {});

  /// One optimizer update with gradients (N, D) of keys (N,); those of equal keys are added in
  /// order. Keys without a row are kMissing and not inserted; shared rows are trained by theirs. An
  /// empty call advances t too. Throws as update. Insertion and erasure wait for it.
  void apply_gradients(std::span<const Key> keys, const float* gradients,
                       std::span<Outcome> outcomes = {});

  /// Pools mapped bags. An empty bag gives zeros. Mean divides by the number of keys of the bag,
  /// weighted mean by the sum of its weights (0 gives zeros). Sums run in bag order.
  /// Throws std::invalid_argument for a row number, offset or stride out of range.
  void pool(std::span<const PoolBlock> blocks) const;

  /// As map without insertion, then pool, but some bags at a time: bag b goes to out[b * stride],
  /// `stride` in floats. outcomes (N,) may be empty. Insertion and erasure wait for it. Throws
  /// std::invalid_argument if the arrays of `bags` do not fit each other, or the stride is below D.
  void pool_keys(const KeyBags& bags, float* out, std::int64_t stride,
                 std::span<Outcome> outcomes = {}) const;

  /// One optimizer update with the gradients of pooled bags, over all blocks together. Gradients of
  /// a row are added in the order of blocks, then of keys. Advances t, also without blocks. Throws
  /// std::invalid_argument for a row number, offset or stride out of range, Error(kNonFinite) under
  /// NonFinite::kRaise. Cost: one read and write of each row, beside a sort.
  void update(std::span<const GradBlock> blocks);

  /// Multiplies each row of keys (N,) that exceeds the limit by max_norm / (norm + 1e-7), once;
  /// returns how many did. State and t stay. The caller holds the rows by a lease, as for an
  /// update. Throws std::invalid_argument for a row number or limit out of range. Cost: reading
  /// these rows; if some exceed, reading them again while insertion waits.
  std::int64_t limit_norms(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                           const NormLimit& limit);
  /// By what limit_norms would multiply: factors (N,), 1 for a row within the limit, and for a key
  /// that reads a constant; that of initial rows too. Throws as limit_norms.
  void norm_factors(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                    const NormLimit& limit, float* factors) const;

  float learning_rate() const;
  /// Of the next updates. Throws std::invalid_argument for one that OptimizerConfig refuses.
  void set_learning_rate(float learning_rate);
  /// t, the number of updates so far.
  std::uint64_t update_count() const;
  /// For restoring a table. Throws std::invalid_argument for more than it can count to.
  void set_update_count(std::uint64_t count);
  /// With catch_up: the sum of log(1 - lr * weight_decay) over all updates. Its difference to a
  /// row's "log_decay" is what the row has yet to catch up. Else 0. Save and restore it with rows.
  double log_decay() const;
  /// Throws std::invalid_argument for what log_decay() cannot give.
  void set_log_decay(double log_decay);

  /// The rows that keys without one share, as they are now; none unless it has such. They are no
  /// keys: they never leave, and neither size nor max_rows counts them.
  SharedRows shared_rows() const;

  /// Number of visible keys.
  std::int64_t size() const;
  TableStats stats() const;
  /// Bytes of memory held: index, rows, metadata, tracked changes, copies for a cut.
  std::int64_t memory_bytes() const;

  /// Exports visible rows with row number >= begin; returns how many, and sets `begin` to where to
  /// go on. Fewer than capacity means the end. Rows inserted or erased between two calls may or may
  /// not be seen. Throws std::invalid_argument for a negative `begin`, a capacity below 1, and
  /// without room for keys.
  std::int64_t export_rows(RowNumber& begin, const ExportBuffer& buffer) const;

  /// A view of the visible rows as they are now, for saving them while the table stays in use; see
  /// recsdk/checkpoint.h. From the first durable cut on, changes are tracked: a bit per row, and
  /// the keys that leave. Waits for running calls; cost: a look at a bit per row. An update beside
  /// a cut copies rows before it changes them. Each of the first 40 or so updates takes some of the
  /// memory for such copies ahead, so that later none waits for the system. It is room for two
  /// updates as large as the largest so far and 8 MiB more, at most 64 MiB, an eighth of the rows
  /// and the last cut's max_copy_bytes; and two bits per row. stats() counts it as tracking_bytes.
  /// A table that is trained and never saved has it too. Throws Error(kBusy) while a cut is open;
  /// std::invalid_argument if changes_only without a durable cut or a restore before, or if an
  /// option is out of range. With eviction a cut also copies the metadata of its rows, which takes
  /// 8 to 48 bytes a row until it is finished.
  Cut cut(const CutOptions& options);
  /// True if a cut may be of changes only.
  bool is_tracking() const;

  /// Makes room for `num_rows` rows in all and backs it with memory now: insertions up to there
  /// wait for no memory and, from a small table on, move no keys. Cost: clearing that memory, and a
  /// move of the keys that are there. If the table then holds far fewer keys, finding them is
  /// slower, for its index is spread as wide as for all. Throws as Index::reserve.
  void reserve(std::int64_t num_rows);

  /// Throws Error(kInternal) naming the first broken invariant. Cost: reads the whole index.
  void check_invariants() const;

  struct Impl;

 private:
  friend struct TableAccess;
  std::shared_ptr<Impl> impl_;
};

/// One table's part of a call over many tables.
struct MapCall {
  Table* table = nullptr;
  std::span<const Key> keys;
  std::span<RowNumber> rows;
  std::span<Outcome> outcomes;
  MapOptions options = {};
};
struct PoolCall {
  const Table* table = nullptr;
  std::span<const PoolBlock> blocks;
};
struct UpdateCall {
  Table* table = nullptr;
  std::span<const GradBlock> blocks;
};

/// The calls above over many tables at once, spread over the thread pool; a table may occur once.
/// All arguments are checked before any table changes. A table either has its part done whole or is
/// unchanged; the first error is thrown after the others have ended.
RECSDK_API void map_tables(std::span<const MapCall> calls);
RECSDK_API void pool_tables(std::span<const PoolCall> calls);
RECSDK_API void update_tables(std::span<const UpdateCall> calls);

}  // namespace recsdk
