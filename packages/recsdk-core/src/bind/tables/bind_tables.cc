// table.h, join_rows.h: Bags, and the calls over the rows of many tables at once.
#include <deque>
#include <optional>

#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/refusals.h"
#include "bindings.h"
#include "recsdk/join_rows.h"
#include "recsdk/table.h"

namespace recsdk::bind {
namespace {

/// What a call reads without the GIL, kept alive until it ends.
template <typename Block>
struct Parsed {
  std::vector<nb::object> kept;
  std::vector<Array> arrays;
  std::deque<std::vector<Block>> blocks;  // of each table
};

PoolBlock pool_block(Parsed<PoolBlock>& parsed, nb::handle object, std::int64_t dim) {
  const nb::tuple parts = items(object, 3, 3, "(table, [(bags, out, column), ...])");
  const PyBags& bags = bags_of(parts[0]);
  const std::int64_t column = integer(parts[2], "column");
  Array out = matrix(parts[1], "out", bags.num_bags(), column, dim);
  require_writable(out);
  parsed.kept.push_back(parts);
  parsed.arrays.push_back(out);
  return {bags.get(), static_cast<float*>(out.data) + column, row_stride(out)};
}

GradBlock grad_block(Parsed<GradBlock>& parsed, nb::handle object, std::int64_t dim) {
  const nb::tuple parts =
      items(object, 3, 4, "(table, [(bags, grad, column[, weights_grad]), ...])");
  const PyBags& bags = bags_of(parts[0]);
  const std::int64_t column = integer(parts[2], "column");
  const Array grad = matrix(parts[1], "grad", bags.num_bags(), column, dim);
  parsed.kept.push_back(parts);
  parsed.arrays.push_back(grad);
  GradBlock block{bags.get(), float_data(grad) + column, row_stride(grad), nullptr};
  if (parts.size() == 4 && !parts[3].is_none()) {
    Array weights_grad = floats(parts[3], "weights_grad", bags.num_keys());
    require_writable(weights_grad);
    parsed.arrays.push_back(weights_grad);
    block.weights_grad = static_cast<float*>(weights_grad.data);
  }
  return block;
}

/// Calls of the engine for [(table, [block, ...]), ...].
template <typename Call, typename Block, typename Convert>
std::vector<Call> parse(Parsed<Block>& parsed, nb::handle calls, const Convert& convert) {
  std::vector<Call> made;
  for (const nb::handle object : sequence(calls, "calls")) {
    const nb::tuple parts = items(object, 2, 2, "(table, blocks)");
    PyTable& table = table_of(parts[0]);
    parsed.kept.push_back(parts);
    std::vector<Block>& blocks = parsed.blocks.emplace_back();
    for (const nb::handle block : sequence(parts[1], "blocks"))
      blocks.push_back(convert(parsed, block, table->config().dim));
    made.push_back({&*table, blocks});
  }
  return made;
}

void pool_all(nb::handle calls) {
  Parsed<PoolBlock> parsed;
  const auto made = parse<PoolCall>(parsed, calls, pool_block);
  const WithoutGil without_gil;
  pool_tables(made);
}

void update_all(nb::handle calls) {
  Parsed<GradBlock> parsed;
  const auto made = parse<UpdateCall>(parsed, calls, grad_block);
  const WithoutGil without_gil;
  update_tables(made);
}

/// Rows of many tables' keys, int64 or int32.
struct GivenRows {
  explicit GivenRows(nb::handle object) {
    if (resolve(object, "rows").scalar == Scalar::kInt32)
      narrow.emplace(object, "rows");
    else
      wide.emplace(object, "rows");
  }
  std::size_t size() const { return narrow ? narrow->span().size() : wide->span().size(); }
  MappedRows part(std::size_t begin, std::size_t count) const {
    if (narrow) return {{}, {}, {}, narrow->span().subspan(begin, count)};
    return {wide->span().subspan(begin, count), {}, {}, {}};
  }

  std::optional<NarrowIntegers> narrow;
  std::optional<Integers> wide;
};

void join(nb::handle rows_object, nb::handle outcomes_object, nb::handle parts_object,
          nb::handle out_object) {
  const Array out = numbers_to_fill(out_object, "out");
  const GivenRows rows(rows_object);
  const auto total = static_cast<std::int64_t>(rows.size());
  std::span<const Outcome> found;
  if (!outcomes_object.is_none()) {
    const Array array = outcomes(outcomes_object, "outcomes", total);
    found = {static_cast<const Outcome*>(array.data), rows.size()};
  }
  const char* const names = "parts (begins, counts, first_rows, default_rows, num_shared)";
  const nb::tuple numbers = items(parts_object, 5, 5, names);
  const Integers begins(numbers[0], "begins");
  const Integers counts(numbers[1], "counts");
  const Integers first_rows(numbers[2], "first_rows");
  const Integers default_rows(numbers[3], "default_rows");
  const Integers num_shared(numbers[4], "num_shared");
  const std::size_t size = begins.span().size();
  require_size("counts", "part of begins", size, counts.span().size());
  require_size("first_rows", "part of begins", size, first_rows.span().size());
  require_size("default_rows", "part of begins", size, default_rows.span().size());
  require_size("num_shared", "part of begins", size, num_shared.span().size());
  std::vector<MappedRows> parts;
  for (std::size_t i = 0; i < size; ++i) {
    const std::int64_t begin = begins.span()[i];
    const std::int64_t count = counts.span()[i];
    require_within("each part", "rows", total, begin, count);
    const auto first = static_cast<std::size_t>(begin);
    const auto n = static_cast<std::size_t>(count);
    MappedRows& part = parts.emplace_back(rows.part(first, n));
    if (!found.empty()) part.outcomes = found.subspan(first, n);
    part.place = {first_rows.span()[i], default_rows.span()[i], num_shared.span()[i]};
  }
  const WithoutGil without_gil;
  if (out.scalar == Scalar::kInt32)
    join_rows(parts, numbers_of<std::int32_t>(out));
  else
    join_rows(parts, numbers_of<std::int64_t>(out));
}

}  // namespace

void bind_tables(nb::module_& module) {
  nb::class_<PyBags>(
      module, "Bags", nb::is_weak_referenceable(),
      "Bags of keys that were mapped before: rows int64 (N,), outcomes uint8 (N,), "
      "offsets (B + 1,) ascending from 0 to N (None: each key is a bag), weights "
      "float32 (N,) or None, pooling \"sum\" or \"mean\". Holds the arrays, no copy.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(),
           nb::arg("rows").none(), nb::arg("outcomes").none(),
           nb::arg("offsets").none() = nb::none(), nb::arg("weights").none() = nb::none(),
           nb::arg("pooling").none() = "sum")
      .def_prop_ro("num_bags", &PyBags::num_bags)
      .def_prop_ro("num_keys", &PyBags::num_keys);
  module.def("join_rows", &join, nb::arg("rows").none(), nb::arg("outcomes").none(),
             nb::arg("parts").none(), nb::arg("out").none());
  module.def("pool_tables", &pool_all, nb::arg("calls").none());
  module.def("update_tables", &update_all, nb::arg("calls").none());
}

}  // namespace recsdk::bind
