#include "arguments/array.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "arguments/array_errors.h"
#include "arguments/dlpack_exchange.h"
#include "arguments/frameworks.h"

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

// By type code of DLPack; further codes are of no use here.
constexpr std::array<char, 4> kKinds = {'i', 'u', 'f', '?'};

PyTypeObject* tensor_type(const Torch& known) {
  return reinterpret_cast<PyTypeObject*>(known.tensor.ptr());
}

Scalar scalar_of(char kind, int itemsize) {
  if (kind == 'i' && itemsize == 8) return Scalar::kInt64;
  if (kind == 'i' && itemsize == 4) return Scalar::kInt32;
  if (kind == 'u' && itemsize == 8) return Scalar::kUint64;
  if (kind == 'u' && itemsize == 1) return Scalar::kUint8;
  if (kind == 'f' && itemsize == 4) return Scalar::kFloat32;
  return Scalar::kOther;
}

bool is_aligned(const Array& array) {
  const auto address = reinterpret_cast<std::uintptr_t>(array.data);
  return array.size() == 0 || address % static_cast<std::uintptr_t>(item_size(array.scalar)) == 0;
}

Scalar scalar_of(const Torch& known, const nb::object& dtype) {
  if (dtype.is(known.int64)) return Scalar::kInt64;
  if (dtype.is(known.float32)) return Scalar::kFloat32;
  if (dtype.is(known.uint8)) return Scalar::kUint8;
  if (dtype.is(known.int32)) return Scalar::kInt32;
  if (dtype.is(known.uint64)) return Scalar::kUint64;
  return Scalar::kOther;
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

void require_writable(Array& array) {
  if (array.framework == Framework::kOther) {
    nb::ndarray<> writable;
    array.is_writable =
        nb::try_cast(with_strides(array.object), writable) && writable.data() == array.data;
  }
  if (!array.is_writable) throw_read_only(array);
}

}  // namespace recsdk::bind
