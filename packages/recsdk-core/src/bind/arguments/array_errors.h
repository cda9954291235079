// Messages about array arguments: what was wrong, what was got, what to pass. All are cold.
#pragma once

#include <string>

#include "arguments/array.h"

namespace recsdk::bind {

/// "numpy.ndarray of float64, shape (3, 4)"
std::string described(nb::handle object);

[[noreturn]] void throw_no_array(const Array& array);
[[noreturn]] void throw_not_on_cpu(const Array& array);
[[noreturn]] void throw_not_dense(const Array& array);
[[noreturn]] void throw_nested(const Array& array);
[[noreturn]] void throw_without_memory(const Array& array);
[[noreturn]] void throw_negated(const Array& array);
[[noreturn]] void throw_moved(const Array& array);
[[noreturn]] void throw_bad_dtype(const Array& array, const char* wanted, const char* convert_to);
[[noreturn]] void throw_bad_rank(const Array& array, const char* wanted);
[[noreturn]] void throw_bad_shape(const Array& array, std::int64_t n);
[[noreturn]] void throw_bad_shape(const Array& array, std::int64_t n, std::int64_t width);
[[noreturn]] void throw_too_small(const Array& array, std::int64_t bags, std::int64_t column,
                                  std::int64_t width);
[[noreturn]] void throw_not_contiguous(const Array& array);
[[noreturn]] void throw_read_only(const Array& array);

}  // namespace recsdk::bind
