// table.h: bags of many tables in one array of each kind.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/joined.h"
#include "arguments/refusals.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/table.h"

namespace recsdk::bind {
namespace {

using Piece = PyJoinedBags::Piece;

/// Where vectors lie: in one dimension, or each bag's in a row of a matrix.
struct Room {
  std::int64_t size = 0;  ///< numbers, or columns
  std::optional<std::int64_t> num_rows;
  std::int64_t row_stride = 0;

  std::int64_t stride(std::int64_t dim) const { return num_rows ? row_stride : dim; }

  void require(const Piece& piece, std::int64_t dim) const {
    const std::int64_t num_bags = piece.bags.num_bags();
    const std::int64_t length = num_rows ? dim : num_bags * dim;
    const bool fits = piece.start >= 0 && piece.start <= size && length <= size - piece.start;
    if (fits && num_bags <= num_rows.value_or(num_bags)) return;
    const std::string numbers = std::to_string(size) + " numbers";
    throw nb::value_error(
        ("the " + std::to_string(num_bags) + " vectors of " + std::to_string(dim) +
         " numbers that begin at " + std::to_string(piece.start) +
         " do not lie within the array, which has " +
         (num_rows ? std::to_string(*num_rows) + " rows of " + numbers : numbers) +
         "; give others as starts of the bags, or a larger array")
            .c_str());
  }
};

struct GivenTable {
  Table* table;
  std::int64_t dim;
};

std::vector<GivenTable> tables_of(const nb::tuple& objects, const PyJoinedBags& bags) {
  if (static_cast<std::int64_t>(objects.size()) != bags.num_tables())
    refuse_value(
        "tables",
        "be as many as the numbers in num_pieces of bags, " + std::to_string(bags.num_tables()),
        objects.size());
  std::vector<GivenTable> found;
  for (const nb::handle object : objects) {
    PyTable& table = table_of(object);
    found.push_back({&*table, table->config().dim});
  }
  return found;
}

const PyJoinedBags& joined_of(nb::handle object) {
  if (!nb::isinstance<PyJoinedBags>(object))
    throw nb::type_error(("bags must be recsdk_core.JoinedBags, got " + shown(object)).c_str());
  return *nb::inst_ptr<PyJoinedBags>(object);
}

/// Calls of the engine for the pieces that `takes` says; `make` makes a block of one.
template <typename Call, typename Block, typename Takes, typename Make>
struct Calls {
  std::vector<Block> blocks;
  std::vector<Call> made;

  Calls(const std::vector<GivenTable>& tables, const PyJoinedBags& bags, const Room& room,
        const Takes& takes, const Make& make) {
    std::vector<std::size_t> ends;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      for (const Piece& piece : bags.pieces_of(static_cast<std::int64_t>(t))) {
        room.require(piece, tables[t].dim);
        if (takes(piece)) blocks.push_back(make(piece, tables[t].dim));
      }
      ends.push_back(blocks.size());
    }
    std::size_t begin = 0;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      made.push_back({tables[t].table, std::span(blocks).subspan(begin, ends[t] - begin)});
      begin = ends[t];
    }
  }
};

/// The memory of a result of one dimension that is given.
Result given_floats(nb::handle object, std::int64_t size, bool is_matrix) {
  Array array = floats(object, "out");
  require_writable(array);
  if (is_matrix)
    throw nb::value_error("out must be None where the result has rows and columns, got an array");
  require_size("out", "number of the result", static_cast<std::size_t>(size),
               static_cast<std::size_t>(array.shape[0]));
  return {nb::borrow(object), array.data};
}

nb::object pool(nb::handle tables_object, nb::handle bags_object, std::int64_t size,
                std::optional<std::int64_t> num_columns,
                std::optional<std::pair<std::int64_t, std::int64_t>> pooled,
                nb::handle out_object) {
  const PyJoinedBags& bags = joined_of(bags_object);
  if (size < 0 || num_columns.value_or(0) < 0)
    refuse_value("the sizes of the result", "be 0 or more",
                 std::to_string(size) + " and " + std::to_string(num_columns.value_or(0)));
  bags.require_unmoved();
  const nb::tuple objects = sequence(tables_object, "tables");
  const std::vector<GivenTable> tables = tables_of(objects, bags);
  const Result out = !out_object.is_none() ? given_floats(out_object, size, num_columns.has_value())
                     : num_columns         ? make_floats(bags.framework(), size, *num_columns)
                                           : make_floats(bags.framework(), size);
  float* const data = static_cast<float*>(out.data);
  const Room room = num_columns ? Room{*num_columns, size, *num_columns} : Room{size, {}, 0};
  std::int64_t num_left = size * num_columns.value_or(1);  // that no piece fills
  const std::int64_t total = num_left;
  const auto takes = [&](const Piece& piece) {
    return !pooled || (piece.start >= pooled->first && piece.start < pooled->second);
  };
  const auto make = [&](const Piece& piece, std::int64_t dim) {
    num_left -= piece.bags.num_bags() * dim;
    return PoolBlock{piece.bags, data + piece.start, room.stride(dim)};
  };
  const Calls<PoolCall, PoolBlock, decltype(takes), decltype(make)> calls(tables, bags, room, takes,
                                                                          make);
  const WithoutGil without_gil;
  if (num_left != 0) std::fill_n(data, total, 0.0F);
  pool_tables(calls.made);
  return out.object;
}

void update(nb::handle tables_object, nb::handle bags_object, nb::handle grad_object) {
  const PyJoinedBags& bags = joined_of(bags_object);
  bags.require_unmoved();
  const nb::tuple objects = sequence(tables_object, "tables");
  const std::vector<GivenTable> tables = tables_of(objects, bags);
  const bool is_matrix = resolve(grad_object, "grad").rank == 2;
  const Array grad = is_matrix ? matrix(grad_object, "grad", 0, 0, 0) : floats(grad_object, "grad");
  const Room room =
      is_matrix ? Room{grad.shape[1], grad.shape[0], row_stride(grad)} : Room{grad.shape[0], {}, 0};
  const auto takes = [](const Piece& /*piece*/) { return true; };
  const auto make = [&](const Piece& piece, std::int64_t dim) {
    return GradBlock{piece.bags, float_data(grad) + piece.start, room.stride(dim), nullptr};
  };
  const Calls<UpdateCall, GradBlock, decltype(takes), decltype(make)> calls(tables, bags, room,
                                                                            takes, make);
  const WithoutGil without_gil;
  update_tables(calls.made);
}

}  // namespace

void bind_joined(nb::module_& module) {
  nb::class_<PyJoinedBags>(
      module, "JoinedBags", nb::is_weak_referenceable(),
      "Bags of many tables' keys, which `map_joined` mapped: pieces one after the other, table by "
      "table. Holds the arrays, no copy.")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    nb::handle>(),
           nb::arg("rows").none(), nb::arg("outcomes").none(), nb::arg("num_pieces").none(),
           nb::arg("num_keys").none(), nb::arg("starts").none(),
           nb::arg("offsets").none() = nb::none(), nb::arg("is_mean").none() = nb::none())
      .def_prop_ro("num_bags", &PyJoinedBags::num_bags)
      .def_prop_ro("num_keys", &PyJoinedBags::num_keys);
  module.def("pool_joined", &pool, nb::arg("tables").none(), nb::arg("bags").none(),
             nb::arg("size"), nb::arg("num_columns").none(), nb::arg("pooled").none(),
             nb::arg("out").none());
  module.def("update_joined", &update, nb::arg("tables").none(), nb::arg("bags").none(),
             nb::arg("grad").none());
}

}  // namespace recsdk::bind
