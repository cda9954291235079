// Reading the nested tuples that calls over many things are given as.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace recsdk::bind {

namespace nb = nanobind;

/// The items of a list or tuple of `size` to `max_size` items. Throws ValueError for another
/// number, which says `shape`: what the call takes.
nb::tuple items(nb::handle object, std::size_t size, std::size_t max_size, const char* shape);

/// An integer. Throws ValueError for anything else.
std::int64_t integer(nb::handle object, const char* name);

}  // namespace recsdk::bind
