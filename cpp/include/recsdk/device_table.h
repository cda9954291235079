// A table whose rows lie in the memory of a device, such as an NPU. It is for programs without
// torch that keep hot rows where they use them.
//
// An Index on the host has the keys, row numbers, outcomes and leases. The rows and their optimizer
// state are arrays on the device, whose size is fixed when the table is made.
//
// Shape letters: N keys, D row width, S state width.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recsdk/error.h"
#include "recsdk/export.h"
#include "recsdk/row_layout.h"
#include "recsdk/table.h"
#include "recsdk/types.h"

namespace recsdk {

/// Names of the backends that this build knows: "cpu", which is the host's own memory, and "npu",
/// Ascend's, whose runtime is looked for when it is first asked for.
RECSDK_API std::vector<std::string> backends();

/// Throws Error(kBackendUnavailable), saying what to install, if the backend cannot be used here;
/// std::invalid_argument for an unknown name.
RECSDK_API void require_backend(const std::string& backend);

/// Where a table's rows lie. Only `max_device_rows` has no default.
struct DeviceOptions {
  std::string backend = "npu";
  int device = 0;                    ///< its ordinal
  std::int64_t max_device_rows = 0;  ///< >= 1; their memory is taken at once
};

/// Counts of a device table, as TableStats, and memory in bytes.
struct DeviceTableStats {
  std::int64_t num_rows = 0;
  std::int64_t num_rows_in_flight = 0;
  std::uint64_t outcomes[kNumOutcomes] = {};
  std::uint64_t erased = 0;
  std::uint64_t updates = 0;
  std::int64_t host_bytes = 0;    ///< index and row numbers
  std::int64_t pinned_bytes = 0;  ///< of the host, for copies; as the largest batch needed
  std::int64_t device_bytes = 0;  ///< rows, and scratch as the largest batch needed
};

/// A table of a fixed number of rows in a device's memory, addressed by raw keys.
///
/// Calls by key take and give arrays of the host, and are done when they return. gather and update
/// take arrays of the device, and only hand the work over: it is done in the order of the calls,
/// after what was handed over before on stream(), and before what is handed over there later.
///
/// A key for which max_device_rows or config.max_rows leaves no room is kRefused: it reads
/// config.default_row.value, gets no gradient and is counted; erase makes room. Under
/// OnFull::kRaise the call throws Error(kCapacity) instead, and so does one that would need rows
/// that leases keep back; it changes nothing.
///
/// Differences to Table: rows are float32; optimizers are SGD, Adagrad, rowwise Adagrad and Adam,
/// with weight decay of both kinds, SGD with momentum; no dampening, clipping, catching up or
/// counts per row, and gradients that are not finite are applied without being counted. Nobody is
/// evicted, all new keys are admitted, and keys without a row read a constant. Sums of gradients
/// are added in another order than a Table's, pairwise, so results are within float order of its;
/// on one kind of device they are repeatable to the bit. On the host a row costs about 30 bytes.
///
/// Thread safety: every method may be called from any thread; calls that reach the device take
/// turns. A call that throws has changed nothing but spare capacity. Error(kDevice): a call of the
/// device's runtime failed. Should the device fail so that an update cannot be undone, every later
/// call that needs it throws that error. Not to be used in a forked child.
class RECSDK_API DeviceTable {
 public:
  /// config.max_rows may be absent. Throws std::invalid_argument for what a device table does not
  /// have, Error(kBackendUnavailable), Error(kOutOfMemory).
  DeviceTable(TableConfig config, DeviceOptions options);
  ~DeviceTable();
  DeviceTable(DeviceTable&&) noexcept;
  DeviceTable& operator=(DeviceTable&&) noexcept;

  const TableConfig& config() const noexcept;
  const DeviceOptions& options() const noexcept;
  /// The fields of a row; offsets mean nothing here, each field is an array of its own.
  const RowLayout& layout() const noexcept;

  /// As Table::lease; for the calls of this table.
  Lease lease(std::optional<std::int64_t> step = std::nullopt);

  /// As Table::map. New rows are handed over before it returns.
  void map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
           const MapOptions& options = {});

  /// Copies the weights of mapped keys (N,) to out (N, D) in device memory, 64-byte aligned; a key
  /// without a row reads the default. Throws std::invalid_argument for a row number out of range or
  /// memory that is not aligned.
  void gather(std::span<const RowNumber> rows, std::span<const Outcome> outcomes, float* out);

  /// One optimizer update with gradients (N, D) in device memory, 64-byte aligned, of mapped keys
  /// (N,). Those of equal rows are added, keys without a row left out. Empty: advances t too. The
  /// gradients must stay until the work is done. Throws as gather.
  void update(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
              const float* gradients);

  /// As Table's. `state` of read_rows (N, S) may be null; a key without a row reads zeros there.
  void lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes = {}) const;
  void read_rows(std::span<const Key> keys, float* values, float* state,
                 std::span<Outcome> outcomes = {}) const;
  void find_or_insert(std::span<const Key> keys, float* values, std::span<Outcome> outcomes = {},
                      const Lease* lease = nullptr);
  void upsert(std::span<const Key> keys, const float* values, const float* state = nullptr,
              std::span<Outcome> outcomes = {});
  void erase(std::span<const Key> keys, std::span<Outcome> outcomes = {});
  void clear();
  void apply_gradients(std::span<const Key> keys, const float* gradients,
                       std::span<Outcome> outcomes = {});
  std::int64_t export_rows(RowNumber& begin, const ExportBuffer& buffer) const;

  /// As Table's.
  float learning_rate() const;
  void set_learning_rate(float learning_rate);
  std::uint64_t update_count() const;
  void set_update_count(std::uint64_t count);

  /// Number of visible keys.
  std::int64_t size() const;
  /// Cost: looks at every segment of the index, and waits for a call that hands work over.
  DeviceTableStats stats() const;

  /// Waits for the work handed over.
  void synchronize() const;
  /// The runtime's handle of the table's stream, an aclrtStream for "npu", null for "cpu". Lives as
  /// long as the table; may be waited for and given work, but not destroyed.
  void* stream() const noexcept;

  /// As Table's, and that no row lies beyond max_device_rows.
  void check_invariants() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace recsdk
