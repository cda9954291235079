// One function per public header of the engine: bind_<header>.cc.
#pragma once

#include <nanobind/nanobind.h>

#include "recsdk/row_layout.h"

namespace recsdk::bind {

namespace nb = nanobind;

/// ((name, width), ...) of the optimizer's state.
nb::tuple state_fields(const RowLayout& layout);

void bind_checkpoint(nb::module_& module);
void bind_columns(nb::module_& module);
void bind_combine(nb::module_& module);
void bind_error(nb::module_& module);
void bind_index(nb::module_& module);
void bind_initializer(nb::module_& module);
void bind_joined(nb::module_& module);
void bind_leavers(nb::module_& module);
void bind_mapping(nb::module_& module);
void bind_optimizer(nb::module_& module);
void bind_policy(nb::module_& module);
void bind_routing(nb::module_& module);
void bind_row_file(nb::module_& module);
void bind_row_layout(nb::module_& module);
void bind_runtime(nb::module_& module);
void bind_serving(nb::module_& module);
void bind_strings(nb::module_& module);
void bind_table(nb::module_& module);
void bind_tables(nb::module_& module);
void bind_types(nb::module_& module);
void bind_vectors(nb::module_& module);

}  // namespace recsdk::bind
