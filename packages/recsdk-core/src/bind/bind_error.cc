// error.h: the engine's errors become the classes of recsdk_core.errors.
#include "recsdk/error.h"

#include <new>

#include "arguments/busy.h"
#include "bindings.h"

namespace recsdk::bind {
namespace {

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "";
    case ErrorCode::kOutOfMemory:
      return "OutOfMemoryError";
    case ErrorCode::kCapacity:
      return "CapacityError";
    case ErrorCode::kBusy:
      return "BusyError";
    case ErrorCode::kNonFinite:
      return "NonFiniteError";
    case ErrorCode::kBackendUnavailable:
      return "BackendUnavailable";
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      return "RecsdkError";
    case ErrorCode::kCheckpoint:
      return "CheckpointError";
  }
  return "RecsdkError";
}

void set_error(ErrorCode code, const char* message) {
  if (code == ErrorCode::kInvalidArgument) {
    PyErr_SetString(PyExc_ValueError, message);
    return;
  }
  const nb::module_ errors = nb::module_::import_("recsdk_core.errors");
  PyErr_SetString(nb::object(errors.attr(class_name(code))).ptr(), message);
}

}  // namespace

void bind_error(nb::module_& module) {
  module.def("set_drop_abandoned", &set_drop_abandoned, nb::arg("function"));
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& found) {
      set_error(found.code(), found.what());
    } catch (const std::bad_alloc&) {
      set_error(ErrorCode::kOutOfMemory, "out of memory");
    }
  });
}

}  // namespace recsdk::bind
