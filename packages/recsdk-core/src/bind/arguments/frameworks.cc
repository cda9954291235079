#include "arguments/frameworks.h"

namespace recsdk::bind {

Names* names;
Numpy* numpy;
Torch* torch;

namespace {

/// The functions that a type of tensors offers, or null.
const dlpack::ExchangeApi* exchange_of(const nb::object& type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  const bool is_known = api->version.major == dlpack::kMajorVersion;
  return is_known && api->view_of_object != nullptr ? api : nullptr;
}

}  // namespace

bool is_instance(nb::handle object, const nb::object& type) {
  auto* wanted = reinterpret_cast<PyTypeObject*>(type.ptr());
  return Py_TYPE(object.ptr()) == wanted || PyType_IsSubtype(Py_TYPE(object.ptr()), wanted) != 0;
}

nb::object attribute(nb::handle object, const nb::object& name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name.ptr()));
  if (!value.is_valid()) nb::raise_python_error();
  return value;
}

nb::object call_method(nb::handle object, const nb::object& name) {
  nb::object value = nb::steal(PyObject_CallMethodObjArgs(object.ptr(), name.ptr(), nullptr));
  if (!value.is_valid()) nb::raise_python_error();
  return value;
}

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

void init_frameworks() {
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

}  // namespace recsdk::bind
