// Operators of their own: what makes and views memory, copies it, and reads single values.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "alias.h"
#include "counts.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace npusim {
namespace {

using OptionalInt = std::optional<std::int64_t>;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors on the cpu can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors on the cpu can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  drain_current_stream(self.device().index());
  return at::native::resize_(self, size, format);
}

// ---- copies ------------------------------------------------------------------------------------

bool is_device(const at::Tensor& tensor) { return tensor.device().type() == c10::kPrivateUse1; }
at::Tensor on_cpu(const at::Tensor& tensor) {
  return is_device(tensor) ? alias_on_cpu(tensor) : tensor;
}

/// Whether the copy is of one piece of memory to one of pinned memory or from it.
bool can_run_later(const at::Tensor& from, const at::Tensor& to) {
  const at::Tensor& host = is_device(from) ? to : from;
  return is_device(from) != is_device(to) && is_pinned(host.const_data_ptr()) &&
         from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
         from.is_contiguous() && to.is_contiguous() && from.nbytes() != 0 && !from.is_conj() &&
         !from.is_neg() && !to.is_conj() && !to.is_neg();
}

/// Host memory is kept until then, as torch's pinned allocators do; device memory is not.
void copy_later(const at::Tensor& from, const at::Tensor& to) {
  const at::Tensor& device = is_device(from) ? from : to;
  const c10::Storage host = (is_device(from) ? to : from).storage();
  const std::size_t size = from.nbytes();
  push(current_stream(device.device().index()), {device.const_data_ptr(), size},
       [host, size, source = from.const_data_ptr(), target = to.mutable_data_ptr()] {
         std::memcpy(target, source, size);
       });
}

/// Whether the host's side is pinned, and what is copied: what is not of one piece, or of another
/// type, is brought together or converted first, on the host in memory that is not pinned.
bool stays_pinned(const at::Tensor& from, const at::Tensor& to) {
  const at::Tensor& host = is_device(from) ? to : from;
  const bool is_converted = is_device(to) && from.scalar_type() != to.scalar_type();
  return is_pinned(host.const_data_ptr()) && host.is_contiguous() && !is_converted;
}

void count_copy_of(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_device(from) == is_device(to)) {
    count_operator("aten::copy_");
    return;
  }
  count_copy(from.nbytes(), is_device(to));
  if (from.nbytes() != 0 && (!non_blocking || !stays_pinned(from, to))) count_waits(1);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  count_copy_of(self, target, non_blocking);
  if (is_async() && non_blocking && can_run_later(self, target)) {
    copy_later(self, target);
    return target;
  }
  for (const at::Tensor* each : {&self, &target}) {
    if (is_device(*each)) drain_current_stream(each->device().index());
  }
  at::Tensor to = on_cpu(target);
  const TimedWork timed;
  to.copy_(on_cpu(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_waits(1);
  drain_current_stream(self.device().index());
  return at::native::_local_scalar_dense_cpu(alias_on_cpu(self));
}

void record_on_stream(at::Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("set_", at::native::set_cpu_);
  library.impl("set_.source_Storage",
               static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_on_stream);
}

// ---- what the Python side asks for -------------------------------------------------------------

std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> counts_of(std::int64_t device) {
  const MemoryCounts found = memory_counts(static_cast<c10::DeviceIndex>(device));
  const auto number = [](std::size_t value) { return static_cast<std::int64_t>(value); };
  return {number(found.allocated), number(found.reserved), number(found.peak), number(found.limit)};
}

std::tuple<c10::Dict<std::string, std::int64_t>, std::int64_t, std::int64_t, std::int64_t, double>
counted_so_far() {
  const Counts found = counted();
  c10::Dict<std::string, std::int64_t> operators;
  for (const auto& [name, count] : found.operators) operators.insert(name, count);
  return {operators, found.waits, found.bytes_to_device, found.bytes_to_host, found.seconds};
}

void reset_peak_of(std::int64_t device) { reset_peak(static_cast<c10::DeviceIndex>(device)); }

void seed(std::int64_t device, std::int64_t value) {
  default_cpu_generator(static_cast<c10::DeviceIndex>(device))
      .set_current_seed(static_cast<std::uint64_t>(value));
}

at::Tensor random_state(std::int64_t device) {
  return default_cpu_generator(static_cast<c10::DeviceIndex>(device)).get_state();
}

void set_random_state(std::int64_t device, const at::Tensor& state) {
  default_cpu_generator(static_cast<c10::DeviceIndex>(device)).set_state(state);
}

/// The bytes of a device tensor as a CPU tensor, once the current stream has been drained.
at::Tensor bytes_on_cpu(const at::Tensor& tensor) {
  drain_current_stream(tensor.device().index());
  return alias_on_cpu(tensor);
}

TORCH_LIBRARY(npusim, library) {
  library.def("is_async() -> bool", is_async);
  library.def("device_count() -> int", [] { return std::int64_t{device_count()}; });
  library.def("memory_counts(int device) -> (int, int, int, int)", counts_of);
  library.def("start_counting(bool is_wanted) -> ()", start_counting);
  library.def("counted() -> (Dict(str, int), int, int, int, float)", counted_so_far);
  library.def("reset_peak(int device) -> ()", reset_peak_of);
  library.def("empty_cache() -> ()", empty_cache);
  library.def("seed(int device, int value) -> ()", seed);
  library.def("random_state(int device) -> Tensor", random_state);
  library.def("set_random_state(int device, Tensor state) -> ()");
  library.def("alias_on_cpu(Tensor tensor) -> Tensor");
}

TORCH_LIBRARY_IMPL(npusim, CPU, library) { library.impl("set_random_state", set_random_state); }
TORCH_LIBRARY_IMPL(npusim, PrivateUse1, library) { library.impl("alias_on_cpu", bytes_on_cpu); }

}  // namespace
}  // namespace npusim
