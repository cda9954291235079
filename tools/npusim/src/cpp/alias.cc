#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory.h"
#include "streams.h"

namespace npusim {
namespace {

const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

c10::Storage storage_on_cpu(const c10::Storage& storage) {
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
          c10::GetCPUAllocator(), /*resizable=*/true};
}

at::Tensor over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& shape) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(),
                                                    shape.storage_offset());
  made._set_conj(shape.is_conj());
  made._set_neg(shape.is_neg());
  return made;
}

bool have_equal_shape(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.storage_offset() == other.storage_offset();
}

/// Gives the storage the bytes that the operator put elsewhere.
void move_bytes(const c10::Storage& from, const c10::Storage& to) {
  const std::size_t size = from.nbytes();
  c10::DataPtr data = device_allocator()->allocate(size);
  if (size != 0) std::memcpy(data.get(), from.data(), size);
  to.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  to.unsafeGetStorageImpl()->set_nbytes(size);
}

}  // namespace

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  return over(storage_on_cpu(tensor.storage()), kCpuKeys, tensor);
}

at::Tensor move_to_device(const at::Tensor& tensor, c10::Device device) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  at::Tensor made = at::detail::empty_strided_generic(
      dense.sizes(), dense.strides(), device_allocator(), kDeviceKeys, dense.scalar_type());
  TORCH_INTERNAL_ASSERT(made.device() == device);
  drain_current_stream(device.index());  // the memory may have been poisoned just now
  if (dense.nbytes() != 0) {
    std::memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
  }
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  c10::Storage shared;
  for (const Pair& pair : pairs_) {
    if (pair.original.is_same(tensor)) return pair.alias;
    if (pair.original.storage().is_alias_of(tensor.storage())) shared = pair.alias.storage();
  }
  if (!shared) shared = storage_on_cpu(tensor.storage());
  pairs_.push_back({tensor, over(std::move(shared), kCpuKeys, tensor)});
  return pairs_.back().alias;
}

void Aliases::carry_over() {
  for (const Pair& pair : pairs_) {
    const c10::Storage& storage = pair.original.storage();
    if (pair.alias.storage().data() != storage.data()) move_bytes(pair.alias.storage(), storage);
  }
  for (const Pair& pair : pairs_) {
    if (have_equal_shape(pair.alias, pair.original)) continue;
    pair.original.unsafeGetTensorImpl()->set_sizes_and_strides(
        pair.alias.sizes(), pair.alias.strides(), pair.alias.storage_offset());
  }
}

at::Tensor Aliases::result(const at::Tensor& result, c10::Device device) const {
  if (!result.defined() || result.device().type() != c10::kCPU) return result;
  for (const Pair& pair : pairs_) {
    if (pair.alias.is_same(result)) return pair.original;
  }
  for (const Pair& pair : pairs_) {
    if (pair.alias.storage().is_alias_of(result.storage())) {
      return over(pair.original.storage(), kDeviceKeys, result);
    }
  }
  return move_to_device(result, device);
}

}  // namespace npusim
