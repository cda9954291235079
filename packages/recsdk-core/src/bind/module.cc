#include "arguments/frameworks.h"
#include "bindings.h"

NB_MODULE(_ext, module) {
  using namespace recsdk::bind;
  module.doc() = "The compiled part: one binding per public header of the engine.";
  module.attr("__version__") = RECSDK_CORE_VERSION;
  // A table that is a global of the user's script lives until the process ends: no leak.
  nanobind::set_leak_warnings(false);
  init_frameworks();
  bind_error(module);
  bind_types(module);
  bind_index(module);
  bind_initializer(module);
  bind_optimizer(module);
  bind_policy(module);
  bind_row_file(module);
  bind_row_layout(module);
  bind_runtime(module);
  bind_leavers(module);
  bind_table(module);
  bind_mapping(module);
  bind_tables(module);
  bind_columns(module);
  bind_joined(module);
  bind_combine(module);
  bind_routing(module);
  bind_strings(module);
  bind_vectors(module);
  bind_checkpoint(module);
  bind_serving(module);
}
