// Letting go of the GIL and taking it, also where the interpreter has begun to end.
//
// From then on Python before 3.14 ends each thread that asks for the GIL, by pthread_exit. glibc
// throws that as an exception, which must pass no destructor: the process would be aborted. So such
// a thread stops here for good, as it does in later Pythons, and the process ends without it.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <utility>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace recsdk::bind {

namespace nb = nanobind;

[[noreturn]] void stop_thread() noexcept;

/// What the call gives, unless Python ends this thread in it.
template <typename Call>
auto unless_ended(const Call& call) {
#ifdef __GLIBCXX__
  try {
    return call();
  } catch (const abi::__forced_unwind&) {
    stop_thread();
  }
#else
  return call();
#endif
}

/// Whether the interpreter has begun to end. A thread that has stopped may then hold any lock of
/// the engine's, so nobody may wait for one.
bool is_ending();

/// While it lives, this thread does not have the GIL that it had.
class WithoutGil {
 public:
  WithoutGil() noexcept : thread_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    unless_ended([this] { PyEval_RestoreThread(thread_); });
  }

 private:
  PyThreadState* thread_;
};

/// While it lives, this thread has the GIL, whether or not it had it.
class WithGil {
 public:
  WithGil() : state_(unless_ended([] { return PyGILState_Ensure(); })) {}
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

/// Ends a handle of the engine's, which waits for locks; where the interpreter ends, the handle is
/// left to the end of the process.
template <typename Handle>
void end_handle(Handle& handle) {
  if (is_ending()) {
    [[maybe_unused]] const auto* const left = new Handle(std::move(handle));
    return;
  }
  const WithoutGil without_gil;
  const Handle ended = std::move(handle);
}

/// Calls a function of Python's from an engine's call: nothing of nanobind's lies in between, which
/// the end of a thread may not pass. Throws what it raises.
template <typename... Arguments>
nb::object call_python(nb::handle function, const Arguments&... arguments) {
  const auto call = [&](const auto&... objects) {
    return unless_ended(
        [&] { return PyObject_CallFunctionObjArgs(function.ptr(), objects.ptr()..., nullptr); });
  };
  PyObject* const result = call(nb::cast(arguments)...);
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

}  // namespace recsdk::bind
