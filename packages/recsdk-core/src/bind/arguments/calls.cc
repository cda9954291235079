#include "arguments/calls.h"

#include <nanobind/stl/string.h>

#include <string>
#include <string_view>

namespace recsdk::bind {
namespace {

constexpr std::size_t kLongestShown = 80;

std::string type_of(nb::handle object) {
  const nb::handle type = object.type();
  return nb::cast<std::string>(nb::str(type.attr("__module__"))) + "." +
         nb::cast<std::string>(nb::str(type.attr("__qualname__")));
}

[[noreturn, gnu::cold]] void refuse_type(const std::string& message) {
  throw nb::type_error(message.c_str());
}

/// True and False, also where numpy or torch holds them: a tensor of one is an index to Python.
bool is_bool(nb::handle object) {
  if (PyLong_CheckExact(object.ptr())) return false;
  if (PyBool_Check(object.ptr())) return true;
  const nb::str type(nb::getattr(object, "dtype", nb::none()));
  return std::string_view(type.c_str()).find("bool") != std::string_view::npos;
}

/// Its items as a tuple; an invalid one if it is no sequence. What a sequence raises is passed on.
nb::tuple items_of(nb::handle object) {
  nb::tuple made = nb::steal<nb::tuple>(PySequence_Tuple(object.ptr()));
  if (made.is_valid()) return made;
  nb::python_error raised;  // takes it over
  if (nb::steal(PyObject_GetIter(object.ptr())).is_valid()) {
    raised.restore();
    nb::raise_python_error();
  }
  PyErr_Clear();
  return made;
}

}  // namespace

std::string shown(nb::handle object) {
  const nb::object text = nb::steal(PyObject_Repr(object.ptr()));
  std::string found;
  if (!text.is_valid()) PyErr_Clear();
  const bool is_short =
      text.is_valid() && nb::try_cast(text, found) && found.size() <= kLongestShown;
  return is_short ? found : type_of(object);
}

bool flag(nb::handle object, const char* name) {
  if (object.is(Py_True)) return true;
  if (object.is(Py_False)) return false;
  refuse_type(std::string(name) + " must be True or False, got " + shown(object));
}

nb::tuple sequence(nb::handle object, const char* name) {
  nb::tuple made = items_of(object);
  if (made.is_valid()) return made;
  refuse_type(std::string(name) + " must be a sequence, got " + shown(object));
}

nb::tuple items(nb::handle object, std::size_t size, std::size_t max_size, const char* shape) {
  nb::tuple made = items_of(object);
  if (!made.is_valid())
    refuse_type(std::string("each call must be ") + shape + ", got " + shown(object));
  if (made.size() < size || made.size() > max_size)
    throw nb::value_error((std::string("each call must be ") + shape + ", got " +
                           std::to_string(made.size()) + " items")
                              .c_str());
  return made;
}

std::int64_t integer(nb::handle object, const char* name) {
  std::int64_t value = 0;
  if (!is_bool(object) && nb::try_cast(object, value)) return value;
  throw nb::value_error(
      (std::string(name) + " must be an int below 2**63, got " + shown(object)).c_str());
}

std::vector<std::int64_t> integer_list(nb::handle object, const char* name) {
  const nb::tuple given = sequence(object, name);
  std::vector<std::int64_t> found;
  found.reserve(given.size());
  for (const nb::handle item : given) found.push_back(integer(item, name));
  return found;
}

std::vector<bool> flag_list(nb::handle object, const char* name) {
  std::vector<bool> found;
  for (const nb::handle item : sequence(object, name)) found.push_back(flag(item, name));
  return found;
}

}  // namespace recsdk::bind
