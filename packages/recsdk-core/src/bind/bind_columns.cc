// columns.h: columns of rows put in a random order, or interleaved.
#include <cstdint>
#include <deque>
#include <vector>

#include "arguments/array.h"
#include "arguments/array_errors.h"
#include "arguments/calls.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/refusals.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/columns.h"

namespace recsdk::bind {
namespace {

/// What a call reads and writes without the GIL, kept alive until it ends.
struct Parsed {
  std::deque<nb::tuple> kept;
  std::deque<Array> arrays;
  std::deque<std::vector<const void*>> parts;  // of each column
  std::deque<std::vector<void*>> stretches;    // of each column
  std::vector<ShuffledColumn> columns;
  std::vector<std::int64_t> part_rows;
  std::vector<std::int64_t> stretch_rows;
};

Array& add_array(Parsed& parsed, nb::handle object, const char* name, const Array* like) {
  Array& array = parsed.arrays.emplace_back(rows(object, name));
  const bool is_alike =
      like == nullptr || (array.scalar == like->scalar && array.rank == like->rank &&
                          (array.rank < 2 || array.shape[1] == like->shape[1]));
  if (!is_alike)
    refuse_value("the parts and stretches of a column", "have one dtype and width",
                 described(like->object) + " and " + described(object));
  return array;
}

void add_rows(std::vector<std::int64_t>& rows, std::size_t at, std::int64_t num_rows) {
  if (at == rows.size()) rows.push_back(num_rows);
  if (rows[at] != num_rows)
    refuse_value("parts and stretches of all columns",
                 "have as many rows as the first column's, " + std::to_string(rows[at]), num_rows);
}

void parse_column(Parsed& parsed, nb::handle object) {
  const nb::tuple items_of = items(object, 2, 2, "a column (parts, stretches)");
  const Array* first = nullptr;
  std::vector<const void*>& parts = parsed.parts.emplace_back();
  const nb::tuple& given_parts = parsed.kept.emplace_back(sequence(items_of[0], "parts"));
  for (const nb::handle part : given_parts) {
    const Array& array = add_array(parsed, part, "part", first);
    first = &array;
    add_rows(parsed.part_rows, parts.size(), array.shape[0]);
    parts.push_back(array.data);
  }
  std::vector<void*>& stretches = parsed.stretches.emplace_back();
  const nb::tuple& given_stretches = parsed.kept.emplace_back(sequence(items_of[1], "stretches"));
  for (const nb::handle stretch : given_stretches) {
    Array& array = add_array(parsed, stretch, "stretch", first);
    require_writable(array);
    add_rows(parsed.stretch_rows, stretches.size(), array.shape[0]);
    stretches.push_back(array.data);
  }
  if (first != nullptr && row_bytes(*first) > 0)
    parsed.columns.push_back({row_bytes(*first), parts, stretches});
}

void write(const Shuffle& shuffle, nb::handle columns, std::int64_t skip) {
  Parsed parsed;
  for (const nb::handle column : sequence(columns, "columns")) parse_column(parsed, column);
  if (parsed.columns.empty()) return;
  const WithoutGil without_gil;
  shuffle.write(parsed.part_rows, parsed.stretch_rows, skip, parsed.columns);
}

nb::object order(const Shuffle& shuffle) {
  const auto size = static_cast<std::size_t>(shuffle.num_rows());
  Result rows = make_rows(Framework::kNumpy, shuffle.num_rows());
  {
    const WithoutGil without_gil;
    shuffle.write_order(row_span(rows, size));
  }
  return std::move(rows.object);
}

bool interleave_columns(nb::handle columns, nb::handle matrix_object) {
  std::vector<Array> arrays;
  std::vector<const float*> pointers;
  const nb::tuple kept = sequence(columns, "columns");
  for (const nb::handle column : kept) {
    arrays.push_back(floats(column, "a column"));
    pointers.push_back(float_data(arrays.back()));
  }
  if (arrays.empty()) throw nb::value_error("there are no columns; give at least one");
  const std::int64_t num_rows = arrays.front().shape[0];
  for (const Array& array : arrays) {
    if (array.shape[0] != num_rows)
      refuse_value("columns", "all have the length of the first, " + std::to_string(num_rows),
                   array.shape[0]);
  }
  const auto width = static_cast<std::int64_t>(arrays.size());
  Array matrix = floats(matrix_object, "matrix", num_rows, width);
  require_writable(matrix);
  const WithoutGil without_gil;
  return interleave(pointers, num_rows, static_cast<float*>(matrix.data));
}

}  // namespace

void bind_columns(nb::module_& module) {
  nb::class_<Shuffle>(module, "Shuffle", nb::is_weak_referenceable())
      .def(nb::init<std::int64_t, std::uint64_t>(), nb::arg("num_rows"), nb::arg("seed"),
           nb::call_guard<WithoutGil>())
      .def_prop_ro("num_rows", &Shuffle::num_rows)
      .def("order", &order)
      .def("write", &write, nb::arg("columns").none(), nb::arg("skip"));
  module.def("interleave", &interleave_columns, nb::arg("columns").none(),
             nb::arg("matrix").none());
}

}  // namespace recsdk::bind
