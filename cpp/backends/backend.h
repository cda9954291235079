// The contract between the engine and a device that keeps rows in memory of its own.
//
// A backend is a folder beside this file: cpu/ is the host itself, npu/ Ascend's ACL runtime. A
// backend that is not there throws Error(kBackendUnavailable) when it is opened; callers know no
// other difference. tests/device/device_conformance_test.cc runs one suite on each.
//
// Shape letters: N rows that a call names, D row width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "recsdk/optimizer.h"

namespace recsdk::internal {

/// Memory from a device starts at a multiple of this, and whoever divides it among several arrays
/// starts each at one, and leaves kDevicePadding bytes between the end of one and the next.
inline constexpr std::size_t kDeviceAlignment = 64;
inline constexpr std::size_t kDevicePadding = 32;

/// Rows of `width` floats, side by side in device memory.
struct DeviceMatrix {
  float* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
};

/// The numbers of one optimizer update, ready for use.
struct UpdateStep {
  OptimizerKind kind = OptimizerKind::kSgd;  ///< SGD, Adagrad, rowwise Adagrad, Adam
  /// Adagrad: lr / (1 + (t - 1) * lr_decay); Adam: lr / (1 - b1^t).
  float learning_rate = 0.0F;
  float eps = 0.0F;
  float beta1 = 0.0F;  ///< Adam
  float one_minus_beta1 = 0.0F;
  float beta2 = 0.0F;
  float one_minus_beta2 = 0.0F;
  float inv_sqrt_bias2 = 0.0F;  ///< 1 / sqrt(1 - b2^t)
  bool has_momentum = false;    ///< SGD
  bool is_nesterov = false;
  float momentum = 0.0F;
  float l2 = 0.0F;            ///< weight decay that is added to the gradient
  float decay_factor = 1.0F;  ///< decoupled weight decay: 1 - lr * weight_decay
};

/// Rows taken out of their table to be updated, in device memory.
struct UpdateRows {
  std::int64_t num_rows = 0;   ///< N
  std::int64_t dim = 0;        ///< D
  float* gradients = nullptr;  ///< (N, D), may be overwritten
  float* weights = nullptr;    ///< (N, D), updated
  float* state[2] = {};        ///< (N, D) each, or (N, 1) of rowwise Adagrad; updated
  float* scratch[2] = {};      ///< (N, D) each
};

/// True if a backend must be able to update rows with an optimizer of this configuration.
bool is_device_optimizer(const OptimizerConfig& config);

/// A point in the work of a stream.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  virtual ~DeviceEvent() = default;

  /// Waits, on the host, for the work before the last record.
  virtual void synchronize() = 0;
};

/// Work that the device does in order, behind the host's back. Calls only hand work over; pinned
/// memory that they name must be left alone until the stream, or an event recorded behind them,
/// is synchronized. Device memory may be used again by later work of the same stream at once.
/// A call of no rows does nothing. Used by one thread at a time.
class DeviceStream {
 public:
  DeviceStream() = default;
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  /// Waits for the work.
  virtual ~DeviceStream() = default;

  /// `pinned` from Device::allocate_pinned; both addresses aligned.
  virtual void copy_to_device(void* to, const void* pinned, std::size_t bytes) = 0;
  virtual void copy_to_host(void* pinned, const void* from, std::size_t bytes) = 0;

  /// out[i] = table[rows[i]]: out (N, width), rows (N,) in device memory, within the table.
  virtual void gather(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
                      float* out) = 0;
  /// table[rows[i]] = values[i]; rows distinct, all else as for gather.
  virtual void scatter(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
                       const float* values) = 0;
  /// sum[i] += addend[i] for matrices (N, width).
  virtual void add(float* sum, const float* addend, std::int64_t num_rows, std::int64_t width) = 0;
  /// Applies an optimizer, see recsdk/optimizer.h, to rows that were gathered.
  virtual void update(const UpdateStep& step, const UpdateRows& rows) = 0;

  virtual void record(DeviceEvent& event) = 0;
  /// Later work of this stream waits for the event's last record.
  virtual void wait(DeviceEvent& event) = 0;
  virtual void synchronize() = 0;

  /// The runtime's own handle, for programs that hand work over themselves; null on the host.
  virtual void* native() const noexcept = 0;
};

/// One device, opened. Its functions, and those of its streams and events, their destruction
/// included, need a CurrentDevice of it in the calling thread. Thread-safe.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  /// "cpu 0"
  virtual std::string name() const = 0;

  /// Aligned, not initialized. Throw Error(kOutOfMemory), saying how much was asked for.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  /// No work may use the memory any more.
  virtual void free(void* memory) noexcept = 0;
  virtual void free_pinned(void* memory) noexcept = 0;

  virtual std::unique_ptr<DeviceStream> make_stream() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;

 private:
  friend class CurrentDevice;
  /// Makes the device the calling thread's; returns what leave() restores.
  virtual void* enter() = 0;
  virtual void leave(void* previous) noexcept = 0;
};

/// While it lives the device is the calling thread's. They nest.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device), previous_(device.enter()) {}
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { device_.leave(previous_); }

 private:
  Device& device_;
  void* previous_;
};

/// Memory of a device that frees itself.
template <bool kPinned>
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, std::size_t bytes)
      : device_(&device),
        data_(kPinned ? device.allocate_pinned(bytes) : device.allocate(bytes)),
        bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    DeviceMemory(std::move(other)).swap(*this);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    if (data_ == nullptr) return;
    kPinned ? device_->free_pinned(data_) : device_->free(data_);
  }

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const noexcept { return bytes_; }

  void swap(DeviceMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};
using DeviceBuffer = DeviceMemory<false>;
using PinnedBuffer = DeviceMemory<true>;

/// Where the next array begins behind one that begins at `offset` and has `bytes` bytes.
constexpr std::size_t next_offset(std::size_t offset, std::size_t bytes) {
  const std::size_t end = offset + bytes + 31U + kDevicePadding;
  return (end + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

/// Names of the backends that this build knows.
std::span<const char* const> backend_names();

/// Opens device `ordinal` of a backend. Throws std::invalid_argument for an unknown name or an
/// ordinal that is out of range, Error(kBackendUnavailable), saying what to install.
std::shared_ptr<Device> open_device(const std::string& backend, int ordinal);

}  // namespace recsdk::internal
