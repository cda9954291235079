// row_layout.h
#include "recsdk/row_layout.h"

#include "bindings.h"

namespace recsdk::bind {

nb::tuple state_fields(const RowLayout& layout) {
  nb::list fields;
  for (std::size_t i = 1; i < layout.fields.size(); ++i)
    fields.append(nb::make_tuple(layout.fields[i].name.c_str(), layout.fields[i].count));
  return nb::tuple(fields);
}

void bind_row_layout(nb::module_& module) {
  nb::enum_<DType>(module, "DType")
      .value("FLOAT32", DType::kFloat32)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16);
  module.def(
      "state_fields",
      [](std::int64_t dim, const OptimizerConfig& optimizer) {
        return state_fields(RowLayout::make(dim, optimizer));
      },
      nb::arg("dim"), nb::arg("optimizer"));
}

}  // namespace recsdk::bind
