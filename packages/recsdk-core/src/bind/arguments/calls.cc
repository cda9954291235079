#include "arguments/calls.h"

#include <nanobind/stl/string.h>

#include <string>

namespace recsdk::bind {

nb::tuple items(nb::handle object, std::size_t size, std::size_t max_size, const char* shape) {
  nb::tuple made = nb::steal<nb::tuple>(PySequence_Tuple(object.ptr()));
  if (!made.is_valid()) nb::raise_python_error();
  if (made.size() < size || made.size() > max_size)
    throw nb::value_error((std::string("each call must be ") + shape + ", got " +
                           std::to_string(made.size()) + " items")
                              .c_str());
  return made;
}

std::int64_t integer(nb::handle object, const char* name) {
  std::int64_t value = 0;
  if (nb::try_cast(object, value)) return value;
  const std::string got = nb::cast<std::string>(nb::repr(object));
  throw nb::value_error((std::string(name) + " must be an int below 2**63, got " + got).c_str());
}

}  // namespace recsdk::bind
