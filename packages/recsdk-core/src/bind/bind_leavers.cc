// leavers.h
#include "recsdk/leavers.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "arguments/array.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/results.h"
#include "bindings.h"

namespace recsdk::bind {
namespace {

/// (keys (n,), causes (n,), weights (n, D), state (n, S) or None)
nb::tuple read(PyLeavers& from, std::optional<std::int64_t> max_rows) {
  Leavers& leavers = from.get();
  std::int64_t capacity = leavers.size();
  if (max_rows) capacity = std::min(capacity, *max_rows);
  Result keys = make_rows(Framework::kNumpy, capacity);
  Result causes = make_outcomes(Framework::kNumpy, capacity);
  Result weights = make_floats(Framework::kNumpy, capacity, from.dim());
  const std::int64_t width = from.state_width();
  Result state = make_floats(Framework::kNumpy, width > 0 ? capacity : 0, width);
  std::int64_t n = 0;
  if (capacity > 0) {
    const WithoutGil without_gil;
    n = leavers.read({capacity, static_cast<Key*>(keys.data), static_cast<LeaveCause*>(causes.data),
                      static_cast<float*>(weights.data),
                      width > 0 ? static_cast<float*>(state.data) : nullptr});
  }
  const nb::slice part(nb::int_(0), nb::int_(n), nb::none());
  return nb::make_tuple(keys.object[part], causes.object[part], weights.object[part],
                        width > 0 ? nb::object(state.object[part]) : nb::none());
}

/// (keys (n,), causes (n,), rows (n,)) of an index's
nb::tuple take(PyLeavers& from) {
  Leavers& leavers = from.get();
  const std::int64_t capacity = leavers.size();
  Result keys = make_rows(Framework::kNumpy, capacity);
  Result causes = make_outcomes(Framework::kNumpy, capacity);
  Result rows = make_rows(Framework::kNumpy, capacity);
  std::int64_t n = 0;
  if (capacity > 0) {
    const WithoutGil without_gil;
    LeaversBuffer buffer{capacity, static_cast<Key*>(keys.data)};
    buffer.causes = static_cast<LeaveCause*>(causes.data);
    buffer.rows = static_cast<RowNumber*>(rows.data);
    n = leavers.take(buffer);
  }
  const nb::slice part(nb::int_(0), nb::int_(n), nb::none());
  return nb::make_tuple(keys.object[part], causes.object[part], rows.object[part]);
}

}  // namespace

void bind_leavers(nb::module_& module) {
  const nb::call_guard<WithoutGil> without_gil;
  nb::enum_<OnOverflow>(module, "OnOverflow")
      .value("COUNT", OnOverflow::kCount)
      .value("BLOCK", OnOverflow::kBlock)
      .value("RAISE", OnOverflow::kRaise);
  nb::class_<PyLeavers>(module, "Leavers")
      .def("read", &read, nb::arg("max_rows").none())
      .def("take", &take)
      .def(
          "free_rows", [](PyLeavers& from, std::int64_t count) { from.get().free_rows(count); },
          nb::arg("count"), without_gil)
      .def(
          "num_ended", [](PyLeavers& from) { return from.get().num_ended(); }, without_gil)
      .def(
          "wait", [](PyLeavers& from, double seconds) { return from.get().wait(seconds); },
          nb::arg("seconds"), without_gil)
      .def(
          "size", [](PyLeavers& from) { return from.get().size(); }, without_gil)
      .def(
          "num_lost", [](PyLeavers& from) { return from.get().num_lost(); }, without_gil)
      .def_prop_ro("max_rows", [](PyLeavers& from) { return from.get().options().max_rows; })
      .def("close", [](PyLeavers& from) { from.get().close(); }, without_gil);
}

}  // namespace recsdk::bind
