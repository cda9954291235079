// A stream of an NPU: copies, and rows by operators of aclnn.
#pragma once

#include <cstdint>
#include <memory>

#include "backends/backend.h"
#include "backends/npu/acl_library.h"

namespace recsdk::internal {

class NpuDevice;

/// The runtime's handle of an event of an NPU.
acl::Event handle_of(DeviceEvent& event);

namespace acl {

/// A descriptor that destroys itself.
template <typename T>
using Descriptor = std::unique_ptr<T, Status (*)(const T*)>;

}  // namespace acl

class NpuStream final : public DeviceStream {
 public:
  explicit NpuStream(NpuDevice& device);
  ~NpuStream() override;

  void copy_to_device(void* to, const void* pinned, std::size_t bytes) override;
  void copy_to_host(void* pinned, const void* from, std::size_t bytes) override;
  void gather(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
              float* out) override;
  void scatter(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
               const float* values) override;
  void add(float* sum, const float* addend, std::int64_t num_rows, std::int64_t width) override;
  void update(const UpdateStep& step, const UpdateRows& rows) override;
  void record(DeviceEvent& event) override;
  void wait(DeviceEvent& event) override;
  void synchronize() override;
  void* native() const noexcept override { return stream_; }

 private:
  using TensorHandle = acl::Descriptor<acl::Tensor>;
  using ScalarHandle = acl::Descriptor<acl::Scalar>;
  struct UpdateTensors;

  // Of contiguous data; a handle lives until its operator is launched.
  TensorHandle tensor(const void* data, acl::DataType dtype, const std::int64_t* dims,
                      std::uint64_t num_dims) const;
  TensorHandle matrix(const float* data, std::int64_t num_rows, std::int64_t width) const;
  TensorHandle indexes(const std::int64_t* data, std::int64_t size) const;
  ScalarHandle scalar(float value) const;

  template <typename Operator, typename... Args>
  void run(const Operator& op, Args... args);
  void* workspace(std::uint64_t bytes);

  // Arithmetic on matrices, in place.
  void scale(const TensorHandle& self, float factor);
  void add_scaled(const TensorHandle& self, const TensorHandle& other, float factor);
  void add_product(const TensorHandle& self, const TensorHandle& a, const TensorHandle& b,
                   float factor);
  void add_quotient(const TensorHandle& self, const TensorHandle& a, const TensorHandle& b,
                    float factor);
  void denominator(const TensorHandle& squares, const TensorHandle& out, float factor, float eps);

  void update_sgd(const UpdateStep& step, const UpdateTensors& rows);
  void update_adagrad(const UpdateStep& step, const UpdateTensors& rows);
  void update_rowwise_adagrad(const UpdateStep& step, const UpdateTensors& rows,
                              const UpdateRows& memory);
  void update_adam(const UpdateStep& step, const UpdateTensors& rows);

  NpuDevice& device_;
  const acl::Library& library_;
  acl::Stream stream_ = nullptr;
  DeviceBuffer workspace_;
};

}  // namespace recsdk::internal
