// Rows on their way into a table: keys, row numbers and records of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/index_queue.h"
#include "keymap/key_map.h"
#include "recsdk/checkpoint.h"
#include "rows/file_fields.h"
#include "rows/row_bits.h"
#include "rows/row_numbers.h"
#include "rows/row_store.h"
#include "table/table_impl.h"
#include "util/owned_here.h"

namespace recsdk::internal {

/// After a call that throws, it can only be destroyed.
struct StagedRows {
  explicit StagedRows(const Table::Impl& target);

  /// The next files belong to another save: their keys may repeat those of earlier files.
  void begin_save();
  /// Says that about so many rows come next. That may be wrong, so memory is taken only as rows
  /// come.
  void expect(std::int64_t num_rows) { expected_ = numbers.end() + num_rows; }
  /// The block has the table's fields; `source` says in messages where it comes from.
  void add_rows(const RowBlock& block, const std::string& source, const RestoreOptions& options);
  void erase(const RowBlock& block, const std::string& source, const RestoreOptions& options);
  /// With eviction: of groups that have too many keys the lowest leave, those below min_age too.
  void fit();
  /// Waits until all keys are in the map, which lags behind; call it before using the map.
  void settle();
  /// Call it after a call that has thrown; when it returns, nothing runs in the background.
  void stop() noexcept { queue_.reset(); }

  const Table::Impl& table;
  std::shared_ptr<KeyMap> key_map;  // shared with the queue's thread
  RowNumbers numbers;
  RowStore rows;
  std::vector<Key> evicted;  // by fit

  /// Where blocks have what a row takes from them.
  struct Places {
    std::vector<std::size_t> fields;  // of the layout; only the first of them without state
    std::vector<std::size_t> meta;    // of each word of metadata; empty: keys were never seen
  };
  Places places;

 private:
  void select(const RowBlock& block, const RestoreOptions& options);
  std::span<const Key> selected_keys(const RowBlock& block);
  std::int64_t keys_to_ready();
  bool append(const RowBlock& block, const std::string& source, bool drop_state);
  void insert_later(NewKeys keys);
  void insert(const NewKeys& keys);
  void place(std::span<const Key> keys, const std::string& source);
  bool is_of_save(std::uint32_t row) const;
  void copy(const RowBlock& block, bool drop_state, std::int64_t begin, std::int64_t end) const;
  void copy_meta(const RowBlock& block, std::size_t first, std::span<const RowNumber> to) const;

  std::int64_t expected_ = 0;            // rows there will be, about
  std::int64_t ready_ = 0;               // rows that the map was last grown for
  bool is_first_ = true;                 // no save before the current one has brought rows
  std::optional<RowBits> in_save_;       // rows that the current save has brought, unless first
  std::vector<std::uint32_t> selected_;  // positions in the block of keys that are kept
  std::vector<Key> keys_;                // those keys, unless they are all
  std::vector<RowNumber> numbers_;       // their rows
  OwnedHere<IndexQueue> queue_;          // of keys of the first save, once there are many
};

}  // namespace recsdk::internal
