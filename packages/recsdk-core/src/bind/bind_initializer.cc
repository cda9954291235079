// initializer.h
#include "recsdk/initializer.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>

#include "arguments/array.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/results.h"
#include "bindings.h"

namespace recsdk::bind {

namespace {

/// A function may resize the array that it is to fill.
void require_same_memory(const Result& values, std::int64_t size) {
  const Array now = resolve(values.object, "values");
  if (now.data != values.data || now.size() != size)
    throw nb::value_error(
        "the custom initializer resized values; fill the array in place and leave its size");
}

nb::object initial_rows(const InitializerConfig& initializer, std::uint64_t seed,
                        const std::string& name, std::int64_t dim, nb::handle keys_object) {
  const Keys keys(keys_object);
  Result values = make_floats(keys.framework(), static_cast<std::int64_t>(keys.size()), dim);
  {
    const WithoutGil without_gil;
    initial_weights(initializer, seed, table_hash(name), dim, keys.span(),
                    static_cast<float*>(values.data));
  }
  return std::move(values.object);
}

}  // namespace

PythonInitializer::PythonInitializer(nb::object python_function, std::int64_t row_width)
    : function(new nb::object(std::move(python_function)), release_python), dim(row_width) {}

void release_python(nb::object* held) {
  if (!nb::is_alive()) return;  // the interpreter is gone, and the object with it
  const WithGil gil;
  delete held;
}

void PythonInitializer::operator()(std::span<const Key> keys, float* values) const {
  const WithGil gil;
  const auto n = static_cast<std::int64_t>(keys.size());
  const std::size_t bytes = keys.size() * static_cast<std::size_t>(dim) * sizeof(float);
  const Result python_keys = make_rows(Framework::kNumpy, n);
  const Result python_values = make_floats(Framework::kNumpy, n, dim);
  std::memcpy(python_keys.data, keys.data(), keys.size_bytes());
  std::memset(python_values.data, 0, bytes);
  call_python(*function, python_keys.object, python_values.object);
  require_same_memory(python_values, n * dim);
  std::memcpy(values, python_values.data, bytes);
}

void bind_initializer(nb::module_& module) {
  nb::class_<InitializerConfig>(module, "InitializerConfig")
      .def_static("constant", &InitializerConfig::constant, nb::arg("value"))
      .def_static("uniform", &InitializerConfig::uniform, nb::arg("low"), nb::arg("high"))
      .def_static("normal", &InitializerConfig::normal, nb::arg("mean"), nb::arg("stddev"))
      .def_static("truncated_normal", &InitializerConfig::truncated_normal, nb::arg("mean"),
                  nb::arg("stddev"), nb::arg("low"), nb::arg("high"))
      .def_static(
          "custom",
          [](nb::object function, std::int64_t dim) {
            return InitializerConfig::custom(PythonInitializer(std::move(function), dim));
          },
          nb::arg("function"), nb::arg("dim"));
  module.def("initial_weights", &initial_rows, nb::arg("initializer"), nb::arg("seed"),
             nb::arg("name"), nb::arg("dim"), nb::arg("keys").none());
  module.def(
      "table_hash", [](const std::string& name) { return table_hash(name); }, nb::arg("name"));
}

}  // namespace recsdk::bind
