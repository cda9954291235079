#include "arguments/array.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <span>

#include <sys/mman.h>
#include <unistd.h>

#include "arguments/array_errors.h"
#include "arguments/dlpack_exchange.h"

namespace recsdk::bind {
namespace {

// The struct behind __array_struct__. Source: numpy's documentation, "The array interface
// protocol".
struct ArrayInterface {
  int two;
  int nd;
  char typekind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* descr;
};
constexpr int kNotSwapped = 0x200;
constexpr int kWriteable = 0x400;

struct Names {
  nb::object array_struct, is_cpu, is_neg, dtype, data_ptr, shape, stride, numel;
};

struct Numpy {
  nb::object ndarray, empty, float32, int32, int64, uint8;
};

struct Torch {
  nb::object tensor, empty, float32, int32, int64, uint8, uint64;
  const dlpack::ExchangeApi* exchange;  // null: this torch has none
};

// By type code of DLPack; further codes are of no use here.
constexpr std::array<char, 4> kKinds = {'i', 'u', 'f', '?'};

// Made once and never freed: the interpreter may be gone before static destructors run.
Names* names;
Numpy* numpy;
Torch* torch;

bool is_instance(nb::handle object, const nb::object& type) {
  auto* wanted = reinterpret_cast<PyTypeObject*>(type.ptr());
  return Py_TYPE(object.ptr()) == wanted || PyType_IsSubtype(Py_TYPE(object.ptr()), wanted) != 0;
}

/// The functions that a type of tensors offers, or null.
const dlpack::ExchangeApi* exchange_of(const nb::object& type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  const bool is_known = api->version.major == dlpack::kMajorVersion;
  return is_known && api->view_of_object != nullptr ? api : nullptr;
}

PyTypeObject* tensor_type(const Torch& known) {
  return reinterpret_cast<PyTypeObject*>(known.tensor.ptr());
}

/// Torch's objects, or null while the process has not imported torch.
const Torch* torch_if_imported() {
  if (torch != nullptr) return torch;
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const nb::object module = modules.attr("get")("torch");
  if (module.is_none() || !nb::hasattr(module, "uint64")) return nullptr;
  torch = new Torch{module.attr("Tensor"),  module.attr("empty"),
                    module.attr("float32"), module.attr("int32"),
                    module.attr("int64"),   module.attr("uint8"),
                    module.attr("uint64"),  exchange_of(module.attr("Tensor"))};
  return torch;
}

Scalar scalar_of(char kind, int itemsize) {
  if (kind == 'i' && itemsize == 8) return Scalar::kInt64;
  if (kind == 'i' && itemsize == 4) return Scalar::kInt32;
  if (kind == 'u' && itemsize == 8) return Scalar::kUint64;
  if (kind == 'u' && itemsize == 1) return Scalar::kUint8;
  if (kind == 'f' && itemsize == 4) return Scalar::kFloat32;
  return Scalar::kOther;
}

std::int64_t item_size(Scalar scalar) {
  switch (scalar) {
    case Scalar::kInt64:
    case Scalar::kUint64:
      return 8;
    case Scalar::kInt32:
    case Scalar::kFloat32:
      return 4;
    case Scalar::kUint8:
    case Scalar::kOther:
      return 1;
  }
  return 1;
}

bool is_aligned(const Array& array) {
  const auto address = reinterpret_cast<std::uintptr_t>(array.data);
  return array.size() == 0 || address % static_cast<std::uintptr_t>(item_size(array.scalar)) == 0;
}

nb::object attribute(nb::handle object, const nb::object& name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name.ptr()));
  if (!value.is_valid()) nb::raise_python_error();
  return value;
}

void resolve_numpy(Array& array) {
  const nb::object capsule = attribute(array.object, names->array_struct);
  const auto* found =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (found == nullptr) nb::raise_python_error();
  array.framework = Framework::kNumpy;
  array.data = found->data;
  array.rank = found->nd;
  array.is_writable = (found->flags & kWriteable) != 0;
  if ((found->flags & kNotSwapped) != 0) array.scalar = scalar_of(found->typekind, found->itemsize);
  for (int i = 0; i < found->nd && i < Array::kMaxRank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    array.shape[at] = found->shape[i];
    // A stride that is no multiple of the item size is not contiguous: 0 says so. Items of an empty
    // structure have no size at all.
    const bool is_whole = found->itemsize > 0 && found->strides[i] % found->itemsize == 0;
    array.strides[at] = is_whole ? found->strides[i] / found->itemsize : 0;
  }
}

Scalar scalar_of(const Torch& known, const nb::object& dtype) {
  if (dtype.is(known.int64)) return Scalar::kInt64;
  if (dtype.is(known.float32)) return Scalar::kFloat32;
  if (dtype.is(known.uint8)) return Scalar::kUint8;
  if (dtype.is(known.int32)) return Scalar::kInt32;
  if (dtype.is(known.uint64)) return Scalar::kUint64;
  return Scalar::kOther;
}

nb::object call_method(nb::handle object, const nb::object& name) {
  nb::object value = nb::steal(PyObject_CallMethodObjArgs(object.ptr(), name.ptr(), nullptr));
  if (!value.is_valid()) nb::raise_python_error();
  return value;
}

std::int64_t item(const nb::object& tuple, int i) {
  return PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), i));
}

/// What a method of a tensor gives; a tensor that is sparse, or has no memory, raises there.
nb::object ask(const Array& array, const nb::object& method) {
  nb::object answer =
      nb::steal(PyObject_CallMethodObjArgs(array.object.ptr(), method.ptr(), nullptr));
  if (answer.is_valid()) return answer;
  PyErr_Clear();
  throw_not_dense(array);
}

/// Whether torch's C functions have told all about a tensor; if not, Python tells, or says why not.
bool resolve_quickly(const Torch& known, Array& array) {
  if (known.exchange == nullptr || Py_TYPE(array.object.ptr()) != tensor_type(known)) return false;
  dlpack::Tensor view{};
  if (known.exchange->view_of_object(array.object.ptr(), &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view.device_type != dlpack::kCpu || view.dtype.lanes != 1 || view.strides == nullptr ||
      call_method(array.object, names->is_neg).is(Py_True)) {
    return false;
  }
  array.scalar = scalar_of(kKinds[std::min<std::size_t>(view.dtype.code, kKinds.size() - 1)],
                           view.dtype.bits / 8);
  array.rank = view.rank;
  for (int i = 0; i < array.rank && i < Array::kMaxRank; ++i) {
    array.shape[static_cast<std::size_t>(i)] = view.shape[i];
    array.strides[static_cast<std::size_t>(i)] = view.strides[i];
  }
  array.data = static_cast<std::byte*>(view.data) + view.byte_offset;
  array.is_writable = true;
  return true;
}

void resolve_torch(const Torch& known, Array& array) {
  array.framework = Framework::kTorch;
  if (resolve_quickly(known, array)) return;
  if (!attribute(array.object, names->is_cpu).is(Py_True)) throw_not_on_cpu(array);
  if (call_method(array.object, names->is_neg).is(Py_True)) throw_negated(array);
  array.scalar = scalar_of(known, attribute(array.object, names->dtype));
  const nb::object shape = nb::steal(PyObject_GetAttr(array.object.ptr(), names->shape.ptr()));
  if (!shape.is_valid()) {
    PyErr_Clear();
    throw_nested(array);
  }
  const nb::object strides = ask(array, names->stride);
  array.rank = static_cast<int>(PyTuple_Size(shape.ptr()));
  for (int i = 0; i < array.rank && i < Array::kMaxRank; ++i) {
    array.shape[static_cast<std::size_t>(i)] = item(shape, i);
    array.strides[static_cast<std::size_t>(i)] = item(strides, i);
  }
  array.data = PyLong_AsVoidPtr(ask(array, names->data_ptr).ptr());
  if (PyErr_Occurred() != nullptr) nb::raise_python_error();
  array.is_writable = true;
}

/// The object, or a memoryview of one that has a buffer only. Such a buffer may leave strides out,
/// as those of ctypes and of numpy's times do, which nanobind does not expect; a memoryview has
/// them.
nb::object with_strides(nb::handle object) {
  if (nb::hasattr(object, "__dlpack__")) return nb::borrow(object);
  nb::object view = nb::steal(PyMemoryView_FromObject(object.ptr()));
  if (view.is_valid()) return view;
  PyErr_Clear();
  return nb::borrow(object);
}

void resolve_dlpack(Array& array) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(with_strides(array.object), view)) throw_no_array(array);
  if (view.device_type() != nb::device::cpu::value) throw_not_on_cpu(array);
  array.data = const_cast<void*>(static_cast<const void*>(view.data()));
  array.rank = static_cast<int>(view.ndim());
  for (std::size_t i = 0; i < view.ndim() && i < Array::kMaxRank; ++i) {
    array.shape[i] = static_cast<std::int64_t>(view.shape(i));
    array.strides[i] = view.stride(i);
  }
  const nb::dlpack::dtype dtype = view.dtype();
  if (dtype.code < kKinds.size() && dtype.lanes == 1)
    array.scalar = scalar_of(kKinds[dtype.code], dtype.bits / 8);
  array.view = std::move(view);
}

bool is_contiguous(const Array& array) {
  if (array.size() <= 1) return true;
  if (array.rank == 1) return array.strides[0] == 1;
  return (array.shape[1] == 1 || array.strides[1] == 1) &&
         (array.shape[0] == 1 || array.strides[0] == array.shape[1]);
}

void require_rank(const Array& array, int rank, const char* shape) {
  if (array.rank != rank) throw_bad_rank(array, shape);
}

void require_contiguous(const Array& array) {
  if (!array.is_aligned || !is_contiguous(array)) throw_not_contiguous(array);
}

/// The elements of an int32 array as int64.
std::vector<std::int64_t> widen(const Array& array) {
  const auto* begin = static_cast<const std::int32_t*>(array.data);
  return {begin, begin + array.shape[0]};
}

std::span<const std::int64_t> int64_span(const Array& array) {
  return {static_cast<const std::int64_t*>(array.data), static_cast<std::size_t>(array.shape[0])};
}

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

void read(Array& array) {
  if (is_instance(array.object, numpy->ndarray)) {
    resolve_numpy(array);
    return;
  }
  const Torch* known = torch_if_imported();
  if (known != nullptr && is_instance(array.object, known->tensor))
    resolve_torch(*known, array);
  else
    resolve_dlpack(array);
}

}  // namespace

void init_arrays() {
  const auto intern = [](const char* name) {
    return nb::object(nb::steal(PyUnicode_InternFromString(name)));
  };
  names =
      new Names{intern("__array_struct__"), intern("is_cpu"), intern("is_neg"), intern("dtype"),
                intern("data_ptr"),         intern("shape"),  intern("stride"), intern("numel")};
  const nb::module_ module = nb::module_::import_("numpy");
  const nb::object dtype = module.attr("dtype");
  numpy = new Numpy{module.attr("ndarray"), module.attr("empty"), dtype("float32"),
                    dtype("int32"),         dtype("int64"),       dtype("uint8")};
}

Array resolve(nb::handle object, const char* name) {
  Array array;
  array.object = object;
  array.name = name;
  read(array);
  if (array.data == nullptr && array.rank >= 1 && array.rank <= 2 && array.size() > 0)
    throw_without_memory(array);
  array.is_aligned = is_aligned(array);
  return array;
}

void require_unmoved(const Array& array) {
  if (!array.object.is_valid() || array.framework == Framework::kOther) return;
  void* data = nullptr;
  std::int64_t size = 0;
  if (array.framework == Framework::kTorch) {
    data = PyLong_AsVoidPtr(call_method(array.object, names->data_ptr).ptr());
    size = PyLong_AsLongLong(call_method(array.object, names->numel).ptr());
  } else {
    Array now;
    now.object = array.object;
    resolve_numpy(now);
    data = now.data;
    size = now.rank == array.rank ? now.size() : -1;
  }
  if (data != array.data || size != array.size()) throw_moved(array);
}

Keys::Keys(nb::handle object, const char* name) : array_(resolve(object, name)) {
  const bool is_narrow = array_.scalar == Scalar::kInt32;
  if (!is_narrow && array_.scalar != Scalar::kInt64 && array_.scalar != Scalar::kUint64)
    throw_bad_dtype(array_, "int64 or uint64", "int64");
  require_rank(array_, 1, "(N,)");
  require_contiguous(array_);
  if (is_narrow) widened_ = widen(array_);
  span_ = is_narrow ? std::span<const Key>(widened_) : int64_span(array_);
}

Array integers(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kInt32 && array.scalar != Scalar::kInt64)
    throw_bad_dtype(array, "int64 or int32", "int64");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Integers::Integers(nb::handle object, const char* name) {
  if (object.is_none()) return;
  array_ = integers(object, name);
  const bool is_narrow = array_.scalar == Scalar::kInt32;
  if (is_narrow) widened_ = widen(array_);
  span_ = is_narrow ? std::span<const std::int64_t>(widened_) : int64_span(array_);
}

NarrowIntegers::NarrowIntegers(nb::handle object, const char* name)
    : array_(resolve(object, name)) {
  const bool is_wide = array_.scalar == Scalar::kInt64;
  if (!is_wide && array_.scalar != Scalar::kInt32)
    throw_bad_dtype(array_, "int32 or int64", "int32");
  require_rank(array_, 1, "one dimension");
  require_contiguous(array_);
  if (!is_wide) {
    span_ = {static_cast<const std::int32_t*>(array_.data),
             static_cast<std::size_t>(array_.shape[0])};
    return;
  }
  for (const std::int64_t number : int64_span(array_)) {
    narrowed_.push_back(static_cast<std::int32_t>(number));
    if (narrowed_.back() != number)
      throw nb::value_error(
          (std::string(name) + " must be below 2**31, got " + std::to_string(number)).c_str());
  }
  span_ = narrowed_;
}

Array numbers_to_fill(nb::handle object, const char* name) {
  Array out = resolve(object, name);
  if (out.scalar != Scalar::kInt32 && out.scalar != Scalar::kInt64)
    throw_bad_dtype(out, "int32 or int64", "int32");
  require_rank(out, 1, "(N,)");
  require_contiguous(out);
  require_writable(out);
  return out;
}

Array floats(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kFloat32) throw_bad_dtype(array, "float32", "float32");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Array floats(nb::handle object, const char* name, std::int64_t n) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kFloat32) throw_bad_dtype(array, "float32", "float32");
  if (array.rank != 1 || array.shape[0] != n) throw_bad_shape(array, n);
  require_contiguous(array);
  return array;
}

Array floats(nb::handle object, const char* name, std::int64_t n, std::int64_t width) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kFloat32) throw_bad_dtype(array, "float32", "float32");
  if (array.rank != 2 || array.shape[0] != n || array.shape[1] != width)
    throw_bad_shape(array, n, width);
  require_contiguous(array);
  return array;
}

Array rows(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  constexpr const char* kKnown = "int64, int32, float32 or uint8";
  if (array.scalar == Scalar::kOther) throw_bad_dtype(array, kKnown, "one of them");
  if (array.rank != 1) require_rank(array, 2, "(N,) or (N, columns)");
  require_contiguous(array);
  return array;
}

std::int64_t row_bytes(const Array& array) {
  return item_size(array.scalar) * (array.rank == 1 ? 1 : array.shape[1]);
}

Array bytes(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kUint8) throw_bad_dtype(array, "uint8", "uint8");
  require_rank(array, 1, "one dimension");
  require_contiguous(array);
  return array;
}

Array outcomes(nb::handle object, const char* name, std::int64_t n) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kUint8) throw_bad_dtype(array, "uint8", "uint8");
  if (array.rank != 1 || array.shape[0] != n) throw_bad_shape(array, n);
  require_contiguous(array);
  return array;
}

Array matrix(nb::handle object, const char* name, std::int64_t bags, std::int64_t column,
             std::int64_t width) {
  Array array = resolve(object, name);
  if (array.scalar != Scalar::kFloat32) throw_bad_dtype(array, "float32", "float32");
  require_rank(array, 2, "(bags, columns)");
  if (array.shape[0] < bags || column < 0 || width > array.shape[1] ||
      column > array.shape[1] - width)
    throw_too_small(array, bags, column, width);
  const bool is_dense = array.size() == 0 || ((array.shape[1] == 1 || array.strides[1] == 1) &&
                                              row_stride(array) >= array.shape[1]);
  if (!array.is_aligned || !is_dense) throw_not_contiguous(array);
  return array;
}

void require_writable(Array& array) {
  if (array.framework == Framework::kOther) {
    nb::ndarray<> writable;
    array.is_writable =
        nb::try_cast(with_strides(array.object), writable) && writable.data() == array.data;
  }
  if (!array.is_writable) throw_read_only(array);
}

Array to_fill(nb::handle object, const char* name) {
  Array array = resolve(object, name);
  if (array.rank != 1) require_rank(array, 2, "(N,) or (N, columns)");
  require_contiguous(array);
  require_writable(array);
  return array;
}

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
