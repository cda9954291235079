// The rows of a device table: an array in device memory per field, and what moves values in and
// out of them.
//
// Everything is work of one stream, so it is done in the order of the calls, and memory for inputs
// and intermediate results is used again by the next call without waiting. What the host writes
// goes through two pinned buffers in turn, each with an event behind its last copy.
//
// Not thread-safe. Every call but the constructor needs a CurrentDevice in the calling thread.
//
// Shape letters: N rows that a call names, D row width, S state width.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "bags/run_sum.h"
#include "recsdk/device_table.h"
#include "recsdk/row_layout.h"

namespace recsdk::internal {

class DeviceRows {
 public:
  /// Takes the memory. Row `options.max_device_rows`, the default row, reads default_value.
  DeviceRows(const DeviceOptions& options, RowLayout layout, float default_value);
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;
  ~DeviceRows();

  Device& device() const noexcept { return *device_; }
  std::shared_ptr<Device> share_device() const noexcept { return device_; }
  RowNumber default_row() const noexcept { return num_rows_; }

  /// Hands over new values of distinct rows (N,): weights (N, D), and state (N, S) or null for that
  /// of a new row. If it throws, what the rows hold is unspecified.
  void write(std::span<const RowNumber> rows, const float* weights, const float* state);
  /// The same, but if it throws the old values stay.
  void replace(std::span<const RowNumber> rows, const float* weights, const float* state);
  /// Reads rows (N,), which may be equal, to the host: weights (N, D) or null, state (N, S) or
  /// null.
  void read(std::span<const RowNumber> rows, float* weights, float* state);
  /// Hands over: weights of rows (N,) to device memory (N, D).
  void gather(std::span<const RowNumber> rows, float* out);
  /// Hands over an update with gradients (N, D) in device memory, added up as `sum` says. If it
  /// throws, all rows stay as they were.
  void update(const UpdateStep& step, const RunSum& sum, std::int64_t num_gradients,
              const float* gradients);
  /// The same with gradients (N, D) on the host, one a row of rows (N,), which are distinct.
  void update(const UpdateStep& step, std::span<const RowNumber> rows, const float* gradients);

  void synchronize() { stream_->synchronize(); }
  void* native_stream() const noexcept { return stream_->native(); }
  /// Throws the error that left rows half changed, if one did.
  void require_whole() const;

  std::int64_t device_bytes() const noexcept;
  std::int64_t pinned_bytes() const noexcept;

 private:
  struct Field {
    std::string name;
    DeviceMatrix matrix;
    float initial_value;
    DeviceBuffer memory;
  };
  // A pinned buffer whose last copy may still be read by the device.
  struct UploadSlot {
    PinnedBuffer buffer;
    std::unique_ptr<DeviceEvent> copied;
    bool is_in_flight = false;
    bool has_event = false;  // else only the stream tells when it is free
  };
  // A part of an upload: from the host, to where it is put in device memory.
  struct Part {
    const void* from;
    std::size_t bytes;
    const void* to = nullptr;
  };

  std::size_t row_floats() const;
  void open(const DeviceOptions& options, float default_value);
  void free_slot(UploadSlot& slot);
  void upload(std::span<Part> parts);
  std::byte* scratch(std::size_t bytes);
  void read_chunk(std::span<const RowNumber> rows, float* weights, float* state);
  std::vector<std::vector<float>> split(std::int64_t num_rows, const float* weights,
                                        const float* state) const;
  void put(std::span<const RowNumber> rows, const float* weights, const float* state,
           bool keeps_old);
  float* add_up(const RunSum& sum, std::span<const Part> steps, const DeviceMatrix& gradients,
                std::array<float*, 3> matrices);
  std::size_t update_bytes(std::int64_t num_rows) const;
  void update_summed(const UpdateStep& step, const std::int64_t* rows, std::int64_t num_rows,
                     float* gradients, std::byte* memory);
  void commit(const std::int64_t* rows, std::int64_t num_rows,
              const std::vector<const float*>& values, const std::vector<const float*>& old);

  std::shared_ptr<Device> device_;
  RowLayout layout_;
  std::int64_t num_rows_;
  std::vector<Field> fields_;  // as the layout has them
  std::array<UploadSlot, 2> slots_;
  std::size_t next_slot_ = 0;
  PinnedBuffer download_;
  DeviceBuffer inputs_;
  DeviceBuffer scratch_;
  std::optional<Error> broken_;
  std::unique_ptr<DeviceStream> stream_;  // the last, so that it ends first
};

}  // namespace recsdk::internal
