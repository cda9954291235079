// vectors.h: packing rows of matrices one after the other.
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "arguments/array.h"
#include "arguments/calls.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/refusals.h"
#include "arguments/results.h"
#include "bindings.h"
#include "recsdk/vectors.h"

namespace recsdk::bind {
namespace {

/// An address also of no rows: null would mean all.
const std::int32_t* address_of(std::span<const std::int32_t> rows) {
  static constexpr std::int32_t kNone = 0;
  return rows.empty() ? &kNone : rows.data();
}

/// Whether rows are 0, 1, 2, ...
bool are_all(std::span<const std::int32_t> rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != static_cast<std::int32_t>(i)) return false;
  }
  return true;
}

/// Blocks of some matrices, and their parts, as arrays of each of their numbers.
class GivenBlocks {
 public:
  explicit GivenBlocks(nb::handle object)
      : items_(items(object, 8, 8,
                     "parts (matrices, columns, widths, num_parts, starts, begins, counts, rows)")),
        matrices_(items_[0], "matrices"),
        columns_(items_[1], "columns"),
        widths_(items_[2], "widths"),
        num_parts_(items_[3], "num_parts"),
        starts_(items_[4], "starts"),
        begins_(items_[5], "begins"),
        counts_(items_[6], "counts"),
        rows_(items_[7], "rows") {
    const std::size_t num_blocks = matrices_.span().size();
    const std::size_t num_parts = starts_.span().size();
    require_size("columns", "block of matrices", num_blocks, columns_.span().size());
    require_size("widths", "block of matrices", num_blocks, widths_.span().size());
    require_size("num_parts", "block of matrices", num_blocks, num_parts_.span().size());
    require_size("begins", "part of starts", num_parts, begins_.span().size());
    require_size("counts", "part of starts", num_parts, counts_.span().size());
  }

  /// Blocks of the engine; messages call the matrices `name`.
  template <typename Block, typename Float>
  std::vector<Block> blocks_of(nb::handle matrices, const char* name, bool is_written) {
    matrices_of_ = sequence(matrices, "matrices");
    std::vector<Block> blocks;
    parts_.resize(starts_.span().size());
    std::size_t begin = 0;
    for (std::size_t i = 0; i < matrices_.span().size(); ++i) {
      const std::int64_t number = matrices_.span()[i];
      require_number_of("matrices", "those that are given", matrices_of_.size(), number);
      const std::int64_t column = columns_.span()[i];
      const std::int64_t width = widths_.span()[i];
      if (width < 0) refuse_value("widths", "be 0 or more", width);
      Array array = matrix(matrices_of_[static_cast<std::size_t>(number)], name, 0, column, width);
      if (is_written) require_writable(array);
      const std::span<const PackedPart> own = parts_of(i, begin, array.shape[0]);
      begin += own.size();
      Float* const data =
          array.data == nullptr ? nullptr : static_cast<Float*>(array.data) + column;
      blocks.push_back({data, row_stride(array), array.shape[0], width, own});
      arrays_.push_back(std::move(array));
    }
    if (begin != parts_.size()) refuse_parts();
    return blocks;
  }

 private:
  [[noreturn, gnu::cold]] void refuse_parts() const {
    refuse_sum("num_parts", "parts", parts_.size(), num_parts_.span());
  }

  /// Those of a block, which begin at `begin`.
  std::span<const PackedPart> parts_of(std::size_t block, std::size_t begin,
                                       std::int64_t num_rows) {
    const std::int64_t count = num_parts_.span()[block];
    if (count < 0 || static_cast<std::size_t>(count) > parts_.size() - begin) refuse_parts();
    const auto own = std::span(parts_).subspan(begin, static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = part(begin + i, num_rows);
    return own;
  }

  PackedPart part(std::size_t i, std::int64_t num_rows) const {
    const auto total = static_cast<std::int64_t>(rows_.span().size());
    const std::int64_t begin = begins_.span()[i];
    const std::int64_t count = counts_.span()[i];
    require_within("each part", "rows", total, begin, count);
    const auto own =
        rows_.span().subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    const bool is_whole = count == num_rows && are_all(own);
    return {starts_.span()[i], is_whole ? nullptr : address_of(own), count};
  }

  nb::tuple items_;
  nb::tuple matrices_of_;
  Integers matrices_, columns_, widths_, num_parts_, starts_, begins_, counts_;
  NarrowIntegers rows_;
  std::vector<PackedPart> parts_;
  std::vector<Array> arrays_;  // kept alive
};

void unpack(nb::handle packed_object, nb::handle parts, nb::handle matrices) {
  const Array packed = floats(packed_object, "packed");
  GivenBlocks given(parts);
  const auto blocks = given.blocks_of<UnpackBlock, float>(matrices, "out", true);
  const WithoutGil without_gil;
  unpack_vectors({float_data(packed), static_cast<std::size_t>(packed.shape[0])}, blocks);
}

void pack(nb::handle matrices, nb::handle parts, nb::handle packed_object, float divisor) {
  Array packed = floats(packed_object, "packed");
  require_writable(packed);
  GivenBlocks given(parts);
  const auto blocks = given.blocks_of<PackBlock, const float>(matrices, "vectors", false);
  const WithoutGil without_gil;
  pack_vectors(blocks, divisor,
               {static_cast<float*>(packed.data), static_cast<std::size_t>(packed.shape[0])});
}

nb::tuple lay_out(nb::handle counts_object, nb::handle stretches_object, std::int64_t num_processes,
                  std::int64_t multiple) {
  const Integers counts(counts_object, "counts");
  const nb::tuple given = items(stretches_object, 3, 3, "stretches (counts, widths, processes)");
  const Integers which(given[0], "counts");
  const Integers widths(given[1], "widths");
  const Integers processes(given[2], "processes");
  const std::size_t size = which.span().size();
  const Result starts = make_rows(Framework::kNumpy, static_cast<std::int64_t>(size));
  const SentFloats sent =
      lay_out_vectors(counts.span(), {which.span(), widths.span(), processes.span()}, num_processes,
                      multiple, row_span(starts, size));
  return nb::make_tuple(starts.object, sent.used, sent.padded);
}

}  // namespace

void bind_vectors(nb::module_& module) {
  module.attr("LARGE_BYTES") = kLargeBytes;
  module.def(
      "ask_for_huge_pages",
      [](nb::handle object, std::size_t num_bytes) {
        ask_for_huge_pages(to_fill(object, "array").data, num_bytes);
      },
      nb::arg("array").none(), nb::arg("num_bytes"));
  module.def("unpack_vectors", &unpack, nb::arg("packed").none(), nb::arg("parts").none(),
             nb::arg("matrices").none());
  module.def("pack_vectors", &pack, nb::arg("matrices").none(), nb::arg("parts").none(),
             nb::arg("packed").none(), nb::arg("divisor"));
  module.def("lay_out_vectors", &lay_out, nb::arg("counts").none(), nb::arg("stretches").none(),
             nb::arg("num_processes"), nb::arg("multiple"));
}

}  // namespace recsdk::bind
