// runtime.h
#include "recsdk/runtime.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments/gil.h"
#include "bindings.h"

namespace recsdk::bind {

void bind_runtime(nb::module_& module) {
  const nb::call_guard<WithoutGil> without_gil;
  module.def("version", &version, "Version of the engine, for example \"0.1.0\".");
  module.def("available_isas", &available_isas);
  module.def("isa", &isa);
  module.def("set_isa", &set_isa, nb::arg("name"), without_gil);
  module.def("num_threads", &num_threads, without_gil);
  module.def("set_num_threads", &set_num_threads, nb::arg("count"), without_gil);
}

}  // namespace recsdk::bind
