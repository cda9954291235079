#include "arguments/gil.h"

#include <chrono>
#include <thread>

namespace recsdk::bind {

void stop_thread() noexcept {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

bool is_ending() {
  const nb::error_scope kept;  // destructors ask, also while an exception is on its way
  PyObject* const function = PySys_GetObject("is_finalizing");
  if (function == nullptr) return true;  // at the very end modules are emptied
  const nb::object answer = nb::steal(PyObject_CallObject(function, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return !answer.is(Py_False);
}

}  // namespace recsdk::bind
