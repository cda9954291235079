#include "backends/npu/npu_stream.h"

#include <algorithm>

#include "backends/npu/npu_device.h"
#include "backends/npu/npu_run.h"

namespace recsdk::internal {

using acl::DataType;

NpuStream::NpuStream(NpuDevice& device) : device_(device), library_(device.library()) {
  library_.check(library_.aclrtCreateStream(&stream_), "aclrtCreateStream");
}

// A stream that cannot be waited for may still be at work: it is stopped by force, because its
// memory is about to be freed.
NpuStream::~NpuStream() {
  const bool is_idle = library_.aclrtSynchronizeStream(stream_) == acl::kSuccess;
  is_idle ? library_.aclrtDestroyStream(stream_) : library_.aclrtDestroyStreamForce(stream_);
}

void NpuStream::copy_to_device(void* to, const void* pinned, std::size_t bytes) {
  if (bytes == 0) return;
  const acl::Status status =
      library_.aclrtMemcpyAsync(to, bytes, pinned, bytes, acl::MemcpyKind::kHostToDevice, stream_);
  library_.check(status, "aclrtMemcpyAsync");
}

void NpuStream::copy_to_host(void* pinned, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const acl::Status status = library_.aclrtMemcpyAsync(pinned, bytes, from, bytes,
                                                       acl::MemcpyKind::kDeviceToHost, stream_);
  library_.check(status, "aclrtMemcpyAsync");
}

void NpuStream::record(DeviceEvent& event) {
  library_.check(library_.aclrtRecordEvent(handle_of(event), stream_), "aclrtRecordEvent");
}

void NpuStream::wait(DeviceEvent& event) {
  library_.check(library_.aclrtStreamWaitEvent(stream_, handle_of(event)), "aclrtStreamWaitEvent");
}

void NpuStream::synchronize() {
  library_.check(library_.aclrtSynchronizeStream(stream_), "aclrtSynchronizeStream");
}

NpuStream::TensorHandle NpuStream::tensor(const void* data, DataType dtype,
                                          const std::int64_t* dims, std::uint64_t num_dims) const {
  // Contiguous: a stride is the number of elements behind it.
  std::int64_t strides[2] = {1, 1};
  if (num_dims == 2) strides[0] = dims[1];
  // Whether it is written is the operator's matter.
  acl::Tensor* const made = library_.aclCreateTensor(
      dims, num_dims, dtype, strides, 0, acl::Format::kNd, dims, num_dims, const_cast<void*>(data));
  return {library_.check(made, "aclCreateTensor"), library_.aclDestroyTensor};
}

NpuStream::TensorHandle NpuStream::matrix(const float* data, std::int64_t num_rows,
                                          std::int64_t width) const {
  const std::int64_t dims[2] = {num_rows, width};
  return tensor(data, DataType::kFloat, dims, 2);
}

NpuStream::TensorHandle NpuStream::indexes(const std::int64_t* data, std::int64_t size) const {
  return tensor(data, DataType::kInt64, &size, 1);
}

NpuStream::ScalarHandle NpuStream::scalar(float value) const {
  acl::Scalar* const made = library_.aclCreateScalar(&value, DataType::kFloat);
  return {library_.check(made, "aclCreateScalar"), library_.aclDestroyScalar};
}

// One for all operators: they run one after the other.
void* NpuStream::workspace(std::uint64_t bytes) {
  if (bytes == 0) return nullptr;
  if (workspace_.bytes() < bytes) {
    synchronize();  // an operator may still use the one at hand
    const std::size_t wanted = std::max<std::size_t>(bytes, 2 * workspace_.bytes());
    workspace_ = {};
    workspace_ = DeviceBuffer(device_, wanted);
  }
  return workspace_.data();
}

void NpuStream::gather(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
                       float* out) {
  if (num_rows == 0) return;
  const TensorHandle self = matrix(table.data, table.num_rows, table.width);
  const TensorHandle index = indexes(rows, num_rows);
  const TensorHandle result = matrix(out, num_rows, table.width);
  run(library_.aclnnIndexSelect, self.get(), 0, index.get(), result.get());
}

void NpuStream::scatter(const DeviceMatrix& table, const std::int64_t* rows, std::int64_t num_rows,
                        const float* values) {
  if (num_rows == 0) return;
  const TensorHandle self = matrix(table.data, table.num_rows, table.width);
  const TensorHandle index = indexes(rows, num_rows);
  const TensorHandle source = matrix(values, num_rows, table.width);
  run(library_.aclnnInplaceIndexCopy, self.get(), 0, index.get(), source.get());
}

void NpuStream::add(float* sum, const float* addend, std::int64_t num_rows, std::int64_t width) {
  if (num_rows == 0) return;
  const TensorHandle self = matrix(sum, num_rows, width);
  const TensorHandle other = matrix(addend, num_rows, width);
  add_scaled(self, other, 1.0F);
}

}  // namespace recsdk::internal
