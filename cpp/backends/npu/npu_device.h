// An NPU through Ascend's runtime.
#pragma once

#include <memory>
#include <string>

#include "backends/backend.h"
#include "backends/npu/acl_library.h"

namespace recsdk::internal {

class NpuDevice final : public Device {
 public:
  /// Throws std::invalid_argument if there is no such device.
  explicit NpuDevice(int ordinal);
  ~NpuDevice() override;

  std::string name() const override { return "npu " + std::to_string(ordinal_); }
  void* allocate(std::size_t bytes) override;
  void* allocate_pinned(std::size_t bytes) override;
  void free(void* memory) noexcept override;
  void free_pinned(void* memory) noexcept override;
  std::unique_ptr<DeviceStream> make_stream() override;
  std::unique_ptr<DeviceEvent> make_event() override;

  const acl::Library& library() const { return library_; }

 private:
  void* enter() override;
  void leave(void* previous) noexcept override;
  void set_device();

  const acl::Library& library_;
  int ordinal_;
  acl::Context context_ = nullptr;  // the default one of the device, as torch_npu uses it too
};

std::shared_ptr<Device> open_npu(int ordinal);

}  // namespace recsdk::internal
