// Fresh arrays for results: of torch if the arguments are torch's, else of numpy.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "arguments/array.h"
#include "recsdk/types.h"

namespace recsdk::bind {

/// What glibc takes from the system for each allocation, and gives back when it is freed.
inline constexpr std::size_t kLargeBytes = std::size_t{32} << 20;

/// For memory that nobody has touched yet. What is large the system gives anew each time, and a
/// result then waits for it page by page: huge ones take 0.3 of the time. Only a wish.
void ask_for_huge_pages(void* data, std::size_t bytes);

/// A fresh array, of torch if the arguments are torch's, else of numpy.
struct Result {
  nb::object object;
  void* data;
};
Result make_floats(Framework framework, std::int64_t n, std::int64_t width);
Result make_floats(Framework framework, std::int64_t n);
Result make_rows(Framework framework, std::int64_t n);
/// int32.
Result make_narrow(Framework framework, std::int64_t n);
Result make_outcomes(Framework framework, std::int64_t n);

inline std::span<Outcome> outcome_span(const Result& result, std::size_t n) {
  return {static_cast<Outcome*>(result.data), n};
}
inline std::span<RowNumber> row_span(const Result& result, std::size_t n) {
  return {static_cast<RowNumber*>(result.data), n};
}

}  // namespace recsdk::bind
