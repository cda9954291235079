// The state behind a DeviceTable: a Table for what the host keeps, and the rows on the device.
//
// Locks are those of the Table: index_mutex, then rows_mutex, which here is held alone by whatever
// reaches the device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/device_rows.h"
#include "recsdk/device_table.h"
#include "table/table_impl.h"

namespace recsdk {

struct DeviceTable::Impl {
  Impl(TableConfig table_config, DeviceOptions device_options);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  const TableConfig config;
  const DeviceOptions options;
  const RowLayout layout;
  Table index;        // a column wide; its rows hold nothing
  Table::Impl& core;  // its state
  std::unique_ptr<internal::DeviceRows> rows;
  /// What the running insertion does behind its new rows, and is taken back with; index_mutex is
  /// held alone.
  std::function<void()> then;

  /// True if it is the device that has no room for a key that the index refuses.
  bool overflows() const;
  void name_refusals(std::span<Outcome> outcomes) const;
  void make_rows(std::span<const std::uint32_t> row_numbers);
  void initial_weights(std::span<const Key> keys, float* weights) const;
  /// Row numbers with the default row in place of none.
  std::vector<RowNumber> or_default(std::span<const RowNumber> row_numbers,
                                    std::span<const Outcome> outcomes) const;
  void check_mapped(std::span<const RowNumber> row_numbers, std::span<const Outcome> outcomes,
                    const float* memory) const;
  /// The numbers of the next update; rows_mutex is held.
  internal::UpdateStep next_step() const;
  /// Reads mapped keys; both locks are held.
  void read(std::span<const RowNumber> row_numbers, std::span<const Outcome> outcomes,
            float* values, float* state);
};

}  // namespace recsdk
