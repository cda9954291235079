// The state behind a DeviceTable: an index on the host, and the rows on the device.
//
// Locks, taken in this order: index.mutex, see index_impl.h, then rows_mutex, which is held by
// whatever reaches the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/device_rows.h"
#include "index/index_impl.h"
#include "recsdk/device_table.h"
#include "util/fair_mutex.h"

namespace recsdk {

struct DeviceTable::Impl final : RowMaker {
  Impl(TableConfig table_config, DeviceOptions device_options);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() override;

  const TableConfig config;
  const DeviceOptions options;
  const RowLayout layout;
  const std::uint64_t table_hash;
  Index keys;          // whose rows are on the device
  Index::Impl& index;  // its state

  mutable internal::FairMutex rows_mutex;
  std::unique_ptr<internal::DeviceRows> rows;
  std::uint64_t update_count = 0;
  std::atomic<float> learning_rate;

  /// Runs under the index's lock.
  void make(const NewRows& added) override;
  /// Throws Error(kCapacity) if keys got row numbers that the device has no rows for.
  void require_room() const;
  /// Row numbers with the default row in place of none.
  std::vector<RowNumber> or_default(std::span<const RowNumber> row_numbers,
                                    std::span<const Outcome> outcomes) const;
  void check_mapped(std::span<const RowNumber> row_numbers, std::span<const Outcome> outcomes,
                    const float* memory) const;
  /// The numbers of the next update; rows_mutex is held.
  internal::UpdateStep next_step() const;
  /// Reads mapped keys; both locks are held.
  void read(const internal::Found& found, float* values, float* state);
};

}  // namespace recsdk
