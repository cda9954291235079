// Row files as Python has them: descriptors or callables for bytes, blocks of numpy arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arguments/checked.h"
#include "arguments/gil.h"
#include "recsdk/row_file.h"

namespace recsdk::bind {

namespace nb = nanobind;

/// What a Python argument named `write` stands for.
struct PySink {
  PySink(nb::handle write, const std::string& name);
  std::unique_ptr<ByteSink> sink;
  bool in_background;  ///< a descriptor may be written by another thread, a callable not
};

/// A block whose arrays Python owns.
struct PyRowBlock {
  BlockKind kind = BlockKind::kRows;
  nb::object keys;  ///< (n,)
  nb::dict fields;  ///< (n, count) by name
  LeaveCause cause = LeaveCause::kEvicted;
};

/// The memory of a block of rows that Python made; holds it. Throws ValueError unless its fields
/// are these.
struct BlockArrays {
  using Contiguous = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

  BlockArrays(const PyRowBlock& block, const std::vector<FileField>& wanted);
  Keys keys;                        ///< (N,)
  std::vector<const void*> fields;  ///< of (N, C) elements each
  std::vector<Contiguous> arrays;
};

/// A reader that threads take turns with.
class PyRowFile {
 public:
  PyRowFile(nb::handle read, std::int64_t size, const std::string& name,
            std::optional<std::int64_t> max_rows, std::optional<std::int64_t> max_erased);

  nb::object next_block();
  RowFileSummary summary();
  const RowFileHeader& header() const { return reader_->header(); }
  /// Calls use(reader) without the GIL, while no other thread does.
  template <typename Use>
  void with_reader(const Use& use) {
    const WithoutGil without_gil;
    const std::lock_guard lock(mutex_);
    use(*reader_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<RowFileReader> reader_;
};

/// Throws ValueError unless it has 16 bytes.
std::array<std::uint8_t, 16> token_of(const nb::bytes& token);
Codec codec_of(const std::string& name);

}  // namespace recsdk::bind
