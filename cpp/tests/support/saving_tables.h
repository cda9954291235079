// A table's visible rows as row files hold them, and restoring files, for tests.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "recsdk/checkpoint.h"
#include "row_files_in_memory.h"

namespace recsdk::test {

/// Visible rows in ascending order of row number; their values are the fields' bytes side by side.
inline std::vector<FileRow> visible_rows(const Table& table) {
  const auto dim = static_cast<std::size_t>(table.layout().dim);
  const auto state_width = static_cast<std::size_t>(table.layout().state_width());
  constexpr std::int64_t kCapacity = 64;
  std::vector<Key> keys(kCapacity);
  std::vector<float> weights(kCapacity * dim);
  std::vector<float> state(kCapacity * state_width);
  const ExportBuffer buffer{kCapacity, keys.data(), weights.data(), state.data()};
  std::vector<FileRow> rows;
  RowNumber begin = 0;
  for (std::int64_t n = kCapacity; n == kCapacity;) {
    n = table.export_rows(begin, buffer);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      FileRow row{keys[i], {}};
      const auto append = [&](const std::vector<float>& values, std::size_t width) {
        if (width == 0) return;
        row.values.append(reinterpret_cast<const char*>(values.data() + i * width), width * 4);
      };
      append(weights, dim);
      append(state, state_width);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

inline std::map<Key, std::string> by_key(const std::vector<FileRow>& rows) {
  std::map<Key, std::string> made;
  for (const FileRow& row : rows) made.emplace(row.key, row.values);
  return made;
}

inline RowFileOptions tiny_blocks(Codec codec = Codec::kNone) {
  return {.codec = codec, .block_bytes = 4096, .in_background = false};
}

/// What a cut has beside rows.
struct BesideRows {
  EvictionState eviction;
  std::vector<AdmitRecord> counts;
  std::optional<SharedRows> shared;
};

/// Writes a cut of the whole table, which is finished as durable; gives what it has beside rows
/// too.
inline Bytes save(Table& table, bool changes_only = false, std::uint8_t token = 1,
                  BesideRows* beside = nullptr) {
  Cut cut = table.cut({.changes_only = changes_only, .max_copy_bytes = {}});
  MemorySink sink;
  WriteOptions options;
  options.token = {token};
  options.file = tiny_blocks();
  write_rows(cut, sink, options);
  if (beside != nullptr)
    *beside = {cut.eviction().value_or(EvictionState{}),
               cut.admission().value_or(std::vector<AdmitRecord>()), cut.shared_rows()};
  cut.finish(true);
  return sink.content;
}

inline void add(Restore& restore, const Bytes& file, const RestoreOptions& options = {}) {
  RowFileReader reader = open(file);
  restore.add_file(reader, options);
}

inline void restore_into(Table& table, const std::vector<Bytes>& files,
                         const RestoreOptions& options = {}) {
  Restore restore(table);
  for (const Bytes& file : files) add(restore, file, options);
  restore.commit(0);
}

}  // namespace recsdk::test
