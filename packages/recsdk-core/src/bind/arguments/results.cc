#include "arguments/results.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <span>

#include <sys/mman.h>
#include <unistd.h>

#include "arguments/dlpack_exchange.h"
#include "arguments/frameworks.h"

namespace recsdk::bind {
namespace {

nb::object shape_tuple(std::span<const std::int64_t> shape) {
  const auto first = static_cast<long long>(shape[0]);
  return nb::steal(shape.size() == 1
                       ? Py_BuildValue("(L)", first)
                       : Py_BuildValue("(LL)", first, static_cast<long long>(shape[1])));
}

Result make_numpy(const nb::object& shape, const nb::object& dtype) {
  nb::object made = nb::steal(
      PyObject_CallFunctionObjArgs(numpy->empty.ptr(), shape.ptr(), dtype.ptr(), nullptr));
  if (!made.is_valid()) nb::raise_python_error();
  Array array;
  array.object = made;
  resolve_numpy(array);
  return {std::move(made), array.data};
}

/// What the scalars that results are made of are called by each framework.
struct ResultType {
  nb::object Numpy::* numpy;
  nb::object Torch::* torch;
  dlpack::DType dlpack;
};

void raise_as_python(void*, const char*, const char* message) {
  PyErr_SetString(PyExc_RuntimeError, message);
}

[[noreturn]] void raise_failed_exchange() {
  if (PyErr_Occurred() == nullptr)
    PyErr_SetString(PyExc_RuntimeError, "torch made no tensor for the result");
  nb::raise_python_error();
}

Result make_quickly(const dlpack::ExchangeApi& exchange, dlpack::DType dtype,
                    std::span<std::int64_t> shape) {
  dlpack::Tensor prototype{};
  prototype.device_type = dlpack::kCpu;
  prototype.rank = static_cast<std::int32_t>(shape.size());
  prototype.dtype = dtype;
  prototype.shape = shape.data();
  dlpack::ManagedTensor* made = nullptr;
  if (exchange.allocate(&prototype, &made, nullptr, raise_as_python) != 0) nb::raise_python_error();
  void* const data = static_cast<std::byte*>(made->tensor.data) + made->tensor.byte_offset;
  void* object = nullptr;
  if (exchange.object_from_managed(made, &object) != 0) raise_failed_exchange();
  return {nb::steal(static_cast<PyObject*>(object)), data};
}

/// A small result's memory as torch takes it over; the numbers follow it.
struct alignas(64) OwnMemory {
  dlpack::ManagedTensor managed;  // first: what its deleter gets
  std::array<std::int64_t, Array::kMaxRank> shape;
  std::array<std::int64_t, Array::kMaxRank> strides;
};

std::size_t bytes_of(dlpack::DType dtype, std::span<const std::int64_t> shape) {
  std::size_t bytes = dtype.bits / 8;
  for (const std::int64_t length : shape) bytes *= static_cast<std::size_t>(length);
  return bytes;
}

/// A tensor on memory of ours: torch's own way to memory takes as long as the rest of a small call.
Result make_on_own_memory(const dlpack::ExchangeApi& exchange, dlpack::DType dtype,
                          std::span<const std::int64_t> shape) {
  constexpr std::size_t kLine = alignof(OwnMemory);
  const std::size_t bytes = (bytes_of(dtype, shape) + kLine - 1) / kLine * kLine;
  void* const block = std::aligned_alloc(kLine, sizeof(OwnMemory) + bytes);
  if (block == nullptr) throw std::bad_alloc();
  auto* const own = new (block) OwnMemory{};
  std::copy(shape.begin(), shape.end(), own->shape.begin());
  own->strides = {shape.size() == 1 ? 1 : shape[1], 1};
  own->managed.version = {dlpack::kMajorVersion, 0};
  own->managed.deleter = [](dlpack::ManagedTensor* managed) { std::free(managed); };
  dlpack::Tensor& tensor = own->managed.tensor;
  tensor.data = own + 1;
  tensor.device_type = dlpack::kCpu;
  tensor.rank = static_cast<std::int32_t>(shape.size());
  tensor.dtype = dtype;
  tensor.shape = own->shape.data();
  tensor.strides = own->strides.data();
  void* object = nullptr;
  // Who frees the memory if this fails is said nowhere: nobody does.
  if (exchange.object_from_managed(&own->managed, &object) != 0) raise_failed_exchange();
  return {nb::steal(static_cast<PyObject*>(object)), own + 1};
}

Result make_torch(std::span<std::int64_t> shape, const ResultType& type) {
  constexpr std::size_t kSmall = 1 << 14;
  if (torch->exchange != nullptr) {
    const bool is_small = bytes_of(type.dlpack, shape) <= kSmall;
    return is_small ? make_on_own_memory(*torch->exchange, type.dlpack, shape)
                    : make_quickly(*torch->exchange, type.dlpack, shape);
  }
  // Of the cpu, whatever device torch takes by default.
  nb::object made = torch->empty(shape_tuple(shape), nb::arg("dtype") = torch->*type.torch,
                                 nb::arg("device") = "cpu");
  void* const data = PyLong_AsVoidPtr(call_method(made, names->data_ptr).ptr());
  return {std::move(made), data};
}

Result make(Framework framework, std::span<std::int64_t> shape, const ResultType& type) {
  if (framework != Framework::kTorch) return make_numpy(shape_tuple(shape), numpy->*type.numpy);
  Result made = make_torch(shape, type);
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (made.data == nullptr && !is_empty) {
    PyErr_SetString(PyExc_RuntimeError,
                    "torch gives results no memory here; call outside of FakeTensorMode and the "
                    "like");
    nb::raise_python_error();
  }
  ask_for_huge_pages(made.data, bytes_of(type.dlpack, shape));
  return made;
}

}  // namespace

void ask_for_huge_pages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kLargeBytes || data == nullptr) return;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_HUGEPAGE);
#endif
}

Result make_floats(Framework framework, std::int64_t n, std::int64_t width) {
  std::array<std::int64_t, 2> shape = {n, width};
  return make(framework, shape, {&Numpy::float32, &Torch::float32, {dlpack::kFloat, 32, 1}});
}

Result make_floats(Framework framework, std::int64_t n) {
  return make(framework, {&n, 1}, {&Numpy::float32, &Torch::float32, {dlpack::kFloat, 32, 1}});
}

Result make_rows(Framework framework, std::int64_t n) {
  return make(framework, {&n, 1}, {&Numpy::int64, &Torch::int64, {dlpack::kInt, 64, 1}});
}

Result make_narrow(Framework framework, std::int64_t n) {
  return make(framework, {&n, 1}, {&Numpy::int32, &Torch::int32, {dlpack::kInt, 32, 1}});
}

Result make_outcomes(Framework framework, std::int64_t n) {
  return make(framework, {&n, 1}, {&Numpy::uint8, &Torch::uint8, {dlpack::kUint, 8, 1}});
}

}  // namespace recsdk::bind
