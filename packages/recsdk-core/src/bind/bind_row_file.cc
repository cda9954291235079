// row_file.h
#include "recsdk/row_file.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "arguments/checked.h"
#include "arguments/gil.h"
#include "arguments/refusals.h"
#include "arguments/results.h"
#include "arguments/row_files.h"
#include "bindings.h"

namespace recsdk::bind {
namespace {

using FieldTuple = std::tuple<std::string, std::string, std::int64_t>;

constexpr FieldType kTypes[] = {FieldType::kFloat32, FieldType::kFloat16, FieldType::kBfloat16,
                                FieldType::kInt64,   FieldType::kUint64,  FieldType::kInt32,
                                FieldType::kUint32,  FieldType::kUint8};

FieldType type_of(const std::string& name) {
  for (const FieldType type : kTypes) {
    if (name == name_of(type)) return type;
  }
  throw nb::value_error(("no type of a field is named '" + name + "'").c_str());
}

const char* kind_name(BlockKind kind) {
  switch (kind) {
    case BlockKind::kRows:
      return "rows";
    case BlockKind::kErased:
      return "erased";
  }
  return "";
}

const char* kind_name(RowFileKind kind) {
  return kind == RowFileKind::kDelta ? "delta" : "snapshot";
}

RowFileKind file_kind_of(const std::string& name) {
  if (name == "snapshot") return RowFileKind::kSnapshot;
  if (name == "delta") return RowFileKind::kDelta;
  throw nb::value_error(("kind must be 'snapshot' or 'delta', got '" + name + "'").c_str());
}

void write_rows_block(RowFileWriter& writer, const PyRowBlock& block, const RowFileHeader& header) {
  const BlockArrays arrays(block, header.fields);
  const WithoutGil without_gil;
  writer.write_rows(arrays.keys.span(), arrays.fields);
}

void write_block(RowFileWriter& writer, const PyRowBlock& block, const RowFileHeader& header) {
  if (block.kind == BlockKind::kRows) return write_rows_block(writer, block, header);
  const Keys keys(block.keys);
  const WithoutGil without_gil;
  writer.write_erased(keys.span(), block.cause);
}

RowFileSummary write_row_file(nb::handle write, const std::string& kind, std::int64_t dim,
                              const std::vector<FieldTuple>& fields, nb::handle blocks,
                              const nb::bytes& token, const std::string& codec,
                              std::int64_t block_bytes, const std::string& name,
                              bool sums_content) {
  const PySink sink(write, name);
  RowFileHeader header{file_kind_of(kind), dim, token_of(token), {}};
  for (const auto& [field, type, count] : fields)
    header.fields.push_back({field, type_of(type), count});
  const RowFileOptions options{codec_of(codec), block_bytes, sink.in_background, sums_content};
  std::unique_ptr<RowFileWriter> writer;
  // Ending a writer waits for its thread, which may wait for the GIL.
  const auto without_gil = [&](const auto& body) {
    const WithoutGil released;
    body();
  };
  try {
    without_gil([&] { writer = std::make_unique<RowFileWriter>(*sink.sink, header, options); });
    for (const nb::handle block : nb::iter(blocks))
      write_block(*writer, nb::cast<const PyRowBlock&>(block), header);
    RowFileSummary summary;
    without_gil([&] {
      summary = writer->finish();
      writer.reset();
    });
    return summary;
  } catch (...) {
    without_gil([&] { writer.reset(); });
    throw;
  }
}

PyRowBlock make_rows(nb::object keys, nb::dict fields) {
  return {BlockKind::kRows, std::move(keys), std::move(fields)};
}
PyRowBlock make_erased(nb::object keys, std::uint8_t cause) {
  if (cause > static_cast<std::uint8_t>(LeaveCause::kExpired))
    refuse_value("cause", "be one of LeaveCause", static_cast<int>(cause));
  return {BlockKind::kErased, std::move(keys), nb::dict(), static_cast<LeaveCause>(cause)};
}
void bind_row_block(nb::module_& module) {
  nb::class_<PyRowBlock>(module, "RowBlock")
      .def_static("rows", &make_rows, nb::arg("keys"), nb::arg("fields"))
      .def_static("erased", &make_erased, nb::arg("keys"),
                  nb::arg("cause") = static_cast<std::uint8_t>(LeaveCause::kErased))
      .def_prop_ro("kind", [](const PyRowBlock& block) { return kind_name(block.kind); })
      .def_prop_ro("cause",
                   [](const PyRowBlock& block) { return static_cast<std::uint8_t>(block.cause); })
      .def_ro("keys", &PyRowBlock::keys)
      .def_ro("fields", &PyRowBlock::fields);
}

nb::tuple fields_of(const PyRowFile& file) {
  nb::list fields;
  for (const FileField& field : file.header().fields)
    fields.append(nb::make_tuple(field.name, name_of(field.type), field.count));
  return nb::tuple(fields);
}

}  // namespace

void bind_row_file(nb::module_& module) {
  module.attr("DEFAULT_BLOCK_BYTES") = kDefaultBlockBytes;
  module.attr("MAX_BLOCK_BYTES") = kMaxBlockBytes;
  module.attr("ROW_FILE_VERSION") = kRowFileVersion;
  module.attr("HAS_ZSTD") = has_codec(Codec::kZstd);
  nb::class_<RowFileSummary>(module, "RowFileSummary")
      .def_ro("num_rows", &RowFileSummary::num_rows)
      .def_ro("num_erased", &RowFileSummary::num_erased)
      .def_ro("num_evicted", &RowFileSummary::num_evicted)
      .def_ro("num_expired", &RowFileSummary::num_expired)
      .def_ro("num_bytes", &RowFileSummary::num_bytes)
      .def_ro("checksum", &RowFileSummary::checksum)
      .def_ro("content", &RowFileSummary::content);
  bind_row_block(module);
  nb::class_<PyRowFile>(module, "RowFile")
      .def(nb::init<nb::handle, std::int64_t, const std::string&, std::optional<std::int64_t>,
                    std::optional<std::int64_t>>(),
           nb::arg("read"), nb::arg("size"), nb::arg("name"),
           nb::arg("max_rows").none() = nb::none(), nb::arg("max_erased").none() = nb::none())
      .def_prop_ro("kind", [](const PyRowFile& file) { return kind_name(file.header().kind); })
      .def_prop_ro("dim", [](const PyRowFile& file) { return file.header().dim; })
      .def_prop_ro("token",
                   [](const PyRowFile& file) {
                     return nb::bytes(file.header().token.data(), file.header().token.size());
                   })
      .def_prop_ro("fields", &fields_of)
      .def("next_block", &PyRowFile::next_block)
      .def("summary", &PyRowFile::summary);
  module.def("write_row_file", &write_row_file, nb::arg("write"), nb::arg("kind"), nb::arg("dim"),
             nb::arg("fields"), nb::arg("blocks"), nb::arg("token"), nb::arg("codec") = "none",
             nb::arg("block_bytes") = kDefaultBlockBytes, nb::arg("name") = "row file",
             nb::arg("sums_content") = false);
  module.def(
      "virtual_shards",
      [](nb::handle keys_object) {
        const Keys keys(keys_object);
        Result shards = make_rows(keys.framework(), static_cast<std::int64_t>(keys.size()));
        const std::span<RowNumber> out = row_span(shards, keys.size());
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = virtual_shard(keys.span()[i]);
        return std::move(shards.object);
      },
      nb::arg("keys"));
}

}  // namespace recsdk::bind
