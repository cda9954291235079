#include "arguments/array_errors.h"

#include <nanobind/stl/string.h>

namespace recsdk::bind {
namespace {

std::string text(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

std::string class_of(nb::handle object) {
  const nb::handle type = object.type();
  return text(type.attr("__module__")) + "." + text(type.attr("__qualname__"));
}

std::string got(const Array& array) { return ", got " + described(array.object); }

std::string argument(const Array& array) { return std::string(array.name); }

[[noreturn]] void throw_type_error(const std::string& message) {
  throw nb::type_error(message.c_str());
}

[[noreturn]] void throw_value_error(const std::string& message) {
  throw nb::value_error(message.c_str());
}

/// A tensor that only stands for one.
void refuse_fake(const Array& array) {
  if (!class_of(array.object).ends_with(".FakeTensor")) return;
  throw_value_error(argument(array) + " must hold numbers that can be read" + got(array) +
                    ", which has none, as while torch.export or a compiler traces a model; leave "
                    "this call out of what is traced");
}

}  // namespace

std::string described(nb::handle object) {
  std::string words = class_of(object);
  if (nb::hasattr(object, "dtype")) words += " of " + text(object.attr("dtype"));
  if (nb::hasattr(object, "shape"))
    words += ", shape " +
             text(nb::steal<nb::object>(PySequence_Tuple(nb::object(object.attr("shape")).ptr())));
  return words;
}

void throw_no_array(const Array& array) {
  throw_type_error(argument(array) +
                   " must be a numpy array, a torch CPU tensor or a DLPack CPU array, got " +
                   class_of(array.object) + "; convert it with numpy.asarray");
}

void throw_not_on_cpu(const Array& array) {
  std::string where = "another device";
  if (nb::hasattr(array.object, "device")) where = text(array.object.attr("device"));
  throw_value_error(argument(array) + " must be on the cpu, got a " + class_of(array.object) +
                    " on " + where + "; pass " + argument(array) + ".cpu()");
}

void throw_not_dense(const Array& array) {
  refuse_fake(array);
  throw_value_error(argument(array) + " must be a dense tensor" + got(array) + " with layout " +
                    text(array.object.attr("layout")) + "; pass " + argument(array) +
                    ".to_dense()");
}

void throw_nested(const Array& array) {
  throw_value_error(argument(array) + " must not be a nested tensor" + got(array) + "; pass " +
                    argument(array) + ".values()");
}

void throw_without_memory(const Array& array) {
  refuse_fake(array);
  throw_value_error(argument(array) + " has no memory" + got(array) +
                    "; pass one whose storage was not freed");
}

void throw_negated(const Array& array) {
  throw_value_error(argument(array) + " must not be a negated view" + got(array) + "; pass " +
                    argument(array) + ".resolve_neg()");
}

void throw_moved(const Array& array) {
  throw_value_error(argument(array) + " was resized after it was given" + got(array) +
                    "; make new Bags of it");
}

void throw_bad_dtype(const Array& array, const char* wanted, const char* convert_to) {
  const std::string conversion = array.framework == Framework::kTorch
                                     ? ".to(torch." + std::string(convert_to) + ")"
                                     : ".astype(numpy." + std::string(convert_to) + ")";
  throw_type_error(argument(array) + " must be " + wanted + got(array) + "; pass " +
                   argument(array) + conversion);
}

void throw_bad_rank(const Array& array, const char* wanted) {
  throw_value_error(argument(array) + " must have shape " + wanted + got(array) +
                    "; pass it reshaped");
}

void throw_bad_shape(const Array& array, std::int64_t n) {
  throw_value_error(argument(array) + " must have shape (" + std::to_string(n) + ",)" + got(array));
}

void throw_bad_shape(const Array& array, std::int64_t n, std::int64_t width) {
  throw_value_error(argument(array) + " must have shape (" + std::to_string(n) + ", " +
                    std::to_string(width) + ")" + got(array));
}

void throw_too_small(const Array& array, std::int64_t bags, std::int64_t column,
                     std::int64_t width) {
  throw_value_error(argument(array) + " must have at least " + std::to_string(bags) + " rows and " +
                    std::to_string(width) + " columns from column " + std::to_string(column) +
                    " on" + got(array));
}

void throw_not_contiguous(const Array& array) {
  // What is contiguous already has to be copied to become aligned.
  const bool is_torch = array.framework == Framework::kTorch;
  const std::string method = array.is_aligned ? ".contiguous()" : ".clone()";
  const std::string function = array.is_aligned ? "numpy.ascontiguousarray(" : "numpy.array(";
  const std::string call = is_torch ? argument(array) + method : function + argument(array) + ")";
  throw_value_error(argument(array) + " must be contiguous in C order and aligned" + got(array) +
                    "; pass " + call);
}

void throw_read_only(const Array& array) {
  throw_value_error(argument(array) + " is written to and must not be read-only" + got(array) +
                    "; pass a writable array");
}

}  // namespace recsdk::bind
