// Row files in memory, for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/row_file.h"

namespace recsdk::test {

using Bytes = std::vector<std::byte>;

/// Keeps what is written; `before` is called before each write.
class MemorySink final : public ByteSink {
 public:
  explicit MemorySink(std::function<void()> before = {}) : before_(std::move(before)) {}
  void write(std::span<const std::byte> bytes) override {
    if (before_) before_();
    content.insert(content.end(), bytes.begin(), bytes.end());
  }
  Bytes content;

 private:
  std::function<void()> before_;
};

/// Reads from memory, at most `most` bytes a call.
class MemorySource final : public ByteSource {
 public:
  explicit MemorySource(Bytes content, std::size_t most = SIZE_MAX)
      : content_(std::move(content)), most_(most) {}
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes) override {
    const std::size_t left = content_.size() - static_cast<std::size_t>(offset);
    const std::size_t n = std::min({bytes.size(), left, most_});
    std::copy_n(content_.begin() + offset, n, bytes.begin());
    return n;
  }

 private:
  Bytes content_;
  std::size_t most_;
};

inline RowFileReader open(const Bytes& bytes, bool in_background = false,
                          std::size_t most = SIZE_MAX) {
  return RowFileReader(std::make_shared<MemorySource>(bytes, most),
                       static_cast<std::int64_t>(bytes.size()), "memory",
                       {.in_background = in_background});
}

/// One row of a file, its fields' bytes side by side.
struct FileRow {
  Key key;
  std::string values;
  bool operator==(const FileRow&) const = default;
};

/// All that a file holds.
struct FileContent {
  RowFileHeader header;
  std::vector<FileRow> rows;
  std::vector<Key> erased;
  RowFileSummary summary;
};

inline FileContent read_all(RowFileReader reader) {
  FileContent content;
  content.header = reader.header();
  RowBlock block;
  while (reader.next(block)) {
    if (block.kind == BlockKind::kErased)
      content.erased.insert(content.erased.end(), block.keys.begin(), block.keys.end());
    if (block.kind != BlockKind::kRows) continue;
    for (std::size_t i = 0; i < block.keys.size(); ++i) {
      FileRow row{block.keys[i], {}};
      for (std::size_t f = 0; f < block.fields.size(); ++f) {
        const auto bytes = static_cast<std::size_t>(content.header.fields[f].row_bytes());
        row.values.append(reinterpret_cast<const char*>(block.fields[f] + i * bytes), bytes);
      }
      content.rows.push_back(std::move(row));
    }
  }
  content.summary = reader.summary();
  return content;
}

/// Codecs that this build can use: all of them, except under an emulator without their libraries.
inline std::vector<Codec> codecs() {
  std::vector<Codec> usable = {Codec::kNone};
  if (has_codec(Codec::kZstd)) usable.push_back(Codec::kZstd);
  return usable;
}

}  // namespace recsdk::test
