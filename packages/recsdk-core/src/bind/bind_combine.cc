// combine.h: each key once, with the sum of its gradients.
#include <algorithm>
#include <string>
#include <vector>

#include "arguments/array.h"
#include "arguments/calls.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/combine.h"

namespace recsdk::bind {
namespace {

nb::tuple distinct(nb::handle object) {
  const Keys keys(object);
  const auto size = static_cast<std::int64_t>(keys.size());
  std::vector<Key> found(keys.size());
  Result which = make_rows(keys.framework(), size);
  std::int64_t count = 0;
  {
    const WithoutGil without_gil;
    count = distinct_keys(keys.span(), found, row_span(which, keys.size()));
  }
  Result result = make_rows(keys.framework(), count);
  std::copy_n(found.begin(), count, static_cast<Key*>(result.data));
  return nb::make_tuple(std::move(result.object), std::move(which.object));
}

void combine(nb::handle blocks, nb::handle packed_object) {
  Array packed = floats(packed_object, "packed");
  require_writable(packed);
  std::vector<nb::tuple> kept;
  std::vector<Array> grads;
  std::vector<CombineBlock> made;
  for (const nb::handle object : sequence(blocks, "blocks")) {
    const nb::tuple& parts =
        kept.emplace_back(items(object, 6, 6, "(bags, grad, column, width, start, num_sums)"));
    const PyBags& bags = bags_of(parts[0]);
    const std::int64_t column = integer(parts[2], "column");
    const std::int64_t width = integer(parts[3], "width");
    if (width < 0)
      throw nb::value_error(("width must not be negative, got " + std::to_string(width)).c_str());
    const std::int64_t start = integer(parts[4], "start");
    const std::int64_t num_sums = integer(parts[5], "num_sums");
    const Array& grad =
        grads.emplace_back(matrix(parts[1], "grad", bags.num_bags(), column, width));
    const std::int64_t size = packed.shape[0];
    if (start < 0 || num_sums < 0 || start > size ||
        (width > 0 && num_sums > (size - start) / width)) {
      throw nb::value_error((std::to_string(num_sums) + " sums of width " + std::to_string(width) +
                             " from " + std::to_string(start) + " on do not fit into packed, " +
                             std::to_string(size) + " floats")
                                .c_str());
    }
    made.push_back({{bags.get(), float_data(grad) + column, row_stride(grad), nullptr},
                    width,
                    num_sums,
                    static_cast<float*>(packed.data) + start});
  }
  const WithoutGil without_gil;
  combine_gradients(made);
}

}  // namespace

void bind_combine(nb::module_& module) {
  module.def("distinct_keys", &distinct, nb::arg("keys").none());
  module.def("combine_gradients", &combine, nb::arg("blocks").none(), nb::arg("packed").none());
}

}  // namespace recsdk::bind
