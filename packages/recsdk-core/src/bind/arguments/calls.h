// Reading arguments that are no arrays: flags, integers, and the nested tuples that calls over many
// things are given as. Each is taken or refused by its name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace recsdk::bind {

namespace nb = nanobind;

/// How messages show what they got: its repr, or its type where that is long or raises.
std::string shown(nb::handle object);

/// True or False. Throws TypeError, which names the argument, for anything else.
bool flag(nb::handle object, const char* name);

/// The items of a sequence. Throws TypeError, which names the argument, for what is none, and what
/// a sequence raises.
nb::tuple sequence(nb::handle object, const char* name);

/// The items of a list or tuple of `size` to `max_size` items. Throws ValueError for another
/// number, which says `shape`: what the call takes.
nb::tuple items(nb::handle object, std::size_t size, std::size_t max_size, const char* shape);

/// An integer, which True and False are not. Throws ValueError for anything else.
std::int64_t integer(nb::handle object, const char* name);

/// Integers, and flags, of a sequence. Throw TypeError or ValueError for anything else.
std::vector<std::int64_t> integer_list(nb::handle object, const char* name);
std::vector<bool> flag_list(nb::handle object, const char* name);

}  // namespace recsdk::bind
