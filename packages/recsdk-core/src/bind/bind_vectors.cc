// vectors.h: packing rows of matrices one after the other.
#include <deque>
#include <vector>

#include "arguments/array.h"
#include "arguments/calls.h"
#include "bindings.h"
#include "recsdk/vectors.h"

namespace recsdk::bind {
namespace {

/// What a call reads without the GIL, kept alive until it ends.
template <typename Block>
struct Parsed {
  std::vector<nb::tuple> kept;
  std::vector<Array> arrays;
  std::deque<Integers> rows;
  std::deque<std::vector<PackedPart>> parts;  // of each block
  std::vector<Block> blocks;
};

template <typename Block>
PackedPart packed_part(Parsed<Block>& parsed, nb::handle object, std::int64_t num_rows) {
  const nb::tuple& items_of =
      parsed.kept.emplace_back(items(object, 2, 2, "a part (start, rows or None)"));
  PackedPart part{integer(items_of[0], "start"), nullptr, num_rows};
  if (!nb::handle(items_of[1]).is_none()) {
    const Integers& rows = parsed.rows.emplace_back(items_of[1], "rows");
    // An empty array may have no address, which would mean all rows.
    static constexpr std::int64_t kNone = 0;
    part.rows = rows.span().empty() ? &kNone : rows.span().data();
    part.num_rows = static_cast<std::int64_t>(rows.span().size());
  }
  return part;
}

/// Blocks of the engine for [(matrix, column, width, [part, ...]), ...].
template <typename Block, typename Float>
void parse(Parsed<Block>& parsed, nb::handle blocks, const char* name, bool is_written) {
  for (const nb::handle object : nb::borrow<nb::iterable>(blocks)) {
    const nb::tuple items_of = items(object, 4, 4, "a block (matrix, column, width, parts)");
    parsed.kept.push_back(items_of);
    const std::int64_t column = integer(items_of[1], "column");
    const std::int64_t width = integer(items_of[2], "width");
    if (width < 0)
      throw nb::value_error(("width must not be negative, got " + std::to_string(width)).c_str());
    Array array = matrix(items_of[0], name, 0, column, width);
    if (is_written) require_writable(array);
    parsed.arrays.push_back(array);
    std::vector<PackedPart>& parts = parsed.parts.emplace_back();
    for (const nb::handle part : nb::borrow<nb::iterable>(items_of[3]))
      parts.push_back(packed_part(parsed, part, array.shape[0]));
    Float* const data = array.data == nullptr ? nullptr : static_cast<Float*>(array.data) + column;
    parsed.blocks.push_back({data, row_stride(array), array.shape[0], width, parts});
  }
}

void unpack(nb::handle packed_object, nb::handle blocks) {
  Parsed<UnpackBlock> parsed;
  const Array packed = floats(packed_object, "packed");
  parse<UnpackBlock, float>(parsed, blocks, "out", true);
  const nb::gil_scoped_release without_gil;
  unpack_vectors({float_data(packed), static_cast<std::size_t>(packed.shape[0])}, parsed.blocks);
}

void pack(nb::handle blocks, nb::handle packed_object, float divisor) {
  Parsed<PackBlock> parsed;
  Array packed = floats(packed_object, "packed");
  require_writable(packed);
  parse<PackBlock, const float>(parsed, blocks, "vectors", false);
  const nb::gil_scoped_release without_gil;
  pack_vectors(parsed.blocks, divisor,
               {static_cast<float*>(packed.data), static_cast<std::size_t>(packed.shape[0])});
}

}  // namespace

void bind_vectors(nb::module_& module) {
  module.def("unpack_vectors", &unpack, nb::arg("packed").none(), nb::arg("blocks").none());
  module.def("pack_vectors", &pack, nb::arg("blocks").none(), nb::arg("packed").none(),
             nb::arg("divisor"));
}

}  // namespace recsdk::bind
