#include "arguments/row_files.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>

#include "arguments/array_errors.h"
#include "arguments/calls.h"
#include "arguments/gil.h"

namespace recsdk::bind {
namespace {

// PyBUF_READ, which the headers of the stable interface name from Python 3.11 on only.
constexpr int kReadOnly = 0x100;

/// Throws TypeError if the argument is neither a descriptor nor a callable.
int descriptor_of(nb::handle object, const char* name) {
  int descriptor = -1;
  if (!nb::try_cast(object, descriptor, false) || descriptor < 0) {
    throw nb::type_error(
        (std::string(name) + " must be a file descriptor or a callable, got " + shown(object))
            .c_str());
  }
  return descriptor;
}

/// Gives a callable views of the bytes, which end with the call.
class CallableSink final : public ByteSink {
 public:
  explicit CallableSink(nb::object function) : function_(std::move(function)) {}
  ~CallableSink() override {
    const WithGil gil;
    function_.reset();
  }

  void write(std::span<const std::byte> bytes) override {
    const WithGil gil;
    while (!bytes.empty()) bytes = bytes.subspan(write_some(bytes));
  }

 private:
  std::size_t write_some(std::span<const std::byte> bytes) {
    auto* const data = const_cast<char*>(reinterpret_cast<const char*>(bytes.data()));
    const nb::object view =
        nb::steal(PyMemoryView_FromMemory(data, static_cast<Py_ssize_t>(bytes.size()), kReadOnly));
    if (!view.is_valid()) nb::raise_python_error();
    const nb::object result = call_python(function_, view);
    view.attr("release")();
    // A raw file may take less than it is given, and says so.
    std::size_t taken = 0;
    const bool is_short = nb::try_cast(result, taken, false) && taken > 0 && taken < bytes.size();
    return is_short ? taken : bytes.size();
  }

  nb::object function_;
};

class CallableSource final : public ByteSource {
 public:
  CallableSource(nb::object function, std::string name)
      : function_(std::move(function)), name_(std::move(name)) {}
  ~CallableSource() override {
    const WithGil gil;
    function_.reset();
  }

  std::size_t read(std::int64_t offset, std::span<std::byte> bytes) override {
    const WithGil gil;
    const nb::object result = call_python(function_, offset, bytes.size());
    nb::bytes data;
    if (!nb::try_cast(result, data) || data.size() > bytes.size()) {
      throw nb::type_error(("'" + name_ + "': read(offset, num_bytes) must return bytes, at most " +
                            "num_bytes of them")
                               .c_str());
    }
    std::memcpy(bytes.data(), data.data(), data.size());
    return data.size();
  }

 private:
  nb::object function_;
  std::string name_;
};

/// bfloat16, which numpy lacks, comes as the 16 bits of each.
nb::dlpack::dtype dtype_of(FieldType type) {
  using Code = nb::dlpack::dtype_code;
  const auto bits = static_cast<std::uint8_t>(8 * size_of(type));
  Code code = Code::UInt;
  if (type == FieldType::kFloat32 || type == FieldType::kFloat16) code = Code::Float;
  if (type == FieldType::kInt64 || type == FieldType::kInt32) code = Code::Int;
  return {static_cast<std::uint8_t>(code), bits, 1};
}

/// A read-only numpy array over a block's memory.
nb::object make_array(const void* data, std::size_t num_dims, const std::size_t* shape,
                      FieldType type, nb::handle owner) {
  return nb::cast(
      nb::ndarray<nb::numpy, nb::ro>(data, num_dims, shape, owner, nullptr, dtype_of(type)));
}

nb::capsule owner_of(const RowBlock& block) {
  using Memory = std::shared_ptr<const std::byte[]>;
  auto memory = std::make_unique<Memory>(block.memory);
  nb::capsule owner(memory.get(), [](void* p) noexcept { delete static_cast<Memory*>(p); });
  [[maybe_unused]] const Memory* const given = memory.release();  // the capsule's now
  return owner;
}

PyRowBlock to_python(const RowBlock& block, const RowFileHeader& header) {
  PyRowBlock made;
  made.cause = block.cause;
  made.kind = block.kind;
  const nb::capsule owner = owner_of(block);
  const std::size_t n = block.keys.size();
  made.keys = make_array(block.keys.data(), 1, &n, FieldType::kInt64, owner);
  for (std::size_t f = 0; f < block.fields.size(); ++f) {
    const FileField& field = header.fields[f];
    const std::size_t shape[] = {n, static_cast<std::size_t>(field.count)};
    made.fields[field.name.c_str()] = make_array(block.fields[f], 2, shape, field.type, owner);
  }
  return made;
}

std::unique_ptr<RowFileReader> open_reader(nb::handle read, std::int64_t size,
                                           const std::string& name, ReadOptions options) {
  const bool is_callable = PyCallable_Check(read.ptr()) != 0;
  std::shared_ptr<ByteSource> source;
  if (is_callable) {
    source = std::make_shared<CallableSource>(nb::borrow(read), name);
  } else {
    source = std::make_shared<FileSource>(descriptor_of(read, "read"), name);
  }
  options.in_background = !is_callable;
  const WithoutGil without_gil;
  return std::make_unique<RowFileReader>(std::move(source), size, name, options);
}

/// The array of one field of a block, which must fit the file's field.
BlockArrays::Contiguous field_array(const PyRowBlock& block, const FileField& field,
                                    std::size_t n) {
  if (!block.fields.contains(field.name.c_str()))
    throw nb::value_error(
        ("the fields of a block must have '" + field.name + "', got " + shown(block.fields.keys()))
            .c_str());
  BlockArrays::Contiguous array;
  const nb::handle given = block.fields[field.name.c_str()];
  const bool is_array = nb::try_cast(given, array, false);
  const auto bits = static_cast<std::uint8_t>(8 * size_of(field.type));
  const bool fits = is_array && array.ndim() == 2 && array.shape(0) == n &&
                    array.shape(1) == static_cast<std::size_t>(field.count) &&
                    array.dtype().bits == bits && array.dtype().lanes == 1;
  if (!fits) {
    throw nb::value_error(("field '" + field.name + "' of a block must be a contiguous array of " +
                           name_of(field.type) + " and shape (" + std::to_string(n) + ", " +
                           std::to_string(field.count) + "), got " + described(given))
                              .c_str());
  }
  return array;
}

}  // namespace

PySink::PySink(nb::handle write, const std::string& name)
    : in_background(PyCallable_Check(write.ptr()) == 0) {
  if (in_background) {
    sink = std::make_unique<FileSink>(descriptor_of(write, "write"), name);
  } else {
    sink = std::make_unique<CallableSink>(nb::borrow(write));
  }
}

BlockArrays::BlockArrays(const PyRowBlock& block, const std::vector<FileField>& wanted)
    : keys(block.keys) {
  for (const FileField& field : wanted) {
    arrays.push_back(field_array(block, field, keys.size()));
    fields.push_back(arrays.back().data());
  }
  if (block.fields.size() != wanted.size())
    throw nb::value_error(("the fields of a block must be those of the file, " +
                           std::to_string(wanted.size()) + ", got " + shown(block.fields.keys()))
                              .c_str());
}

PyRowFile::PyRowFile(nb::handle read, std::int64_t size, const std::string& name,
                     std::optional<std::int64_t> max_rows, std::optional<std::int64_t> max_erased)
    : reader_(open_reader(read, size, name, {.max_rows = max_rows, .max_erased = max_erased})) {}

nb::object PyRowFile::next_block() {
  std::optional<RowBlock> block(std::in_place);
  with_reader([&](RowFileReader& reader) {
    if (!reader.next(*block)) block.reset();
  });
  if (!block) return nb::none();
  return nb::cast(to_python(*block, header()));
}

RowFileSummary PyRowFile::summary() {
  RowFileSummary summary;
  with_reader([&](RowFileReader& reader) { summary = reader.summary(); });
  return summary;
}

std::array<std::uint8_t, 16> token_of(const nb::bytes& token) {
  std::array<std::uint8_t, 16> made;
  if (token.size() != made.size()) {
    throw nb::value_error(
        ("token must have 16 bytes, got " + std::to_string(token.size())).c_str());
  }
  std::memcpy(made.data(), token.data(), made.size());
  return made;
}

Codec codec_of(const std::string& name) {
  if (name == "none") return Codec::kNone;
  if (name == "zstd") return Codec::kZstd;
  throw nb::value_error(("codec must be 'none' or 'zstd', got '" + name + "'").c_str());
}

}  // namespace recsdk::bind
