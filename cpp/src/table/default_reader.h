// Where keys without a row read.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "bags/buffer.h"
#include "kernels/kernels.h"
#include "recsdk/types.h"
#include "table/table_impl.h"

namespace recsdk::internal {

/// What some mapped keys read that have no row: the shared rows of their table, or rows that are
/// made here and go with it. The table's rows are locked as long as it lives.
class DefaultReader {
 public:
  /// `rows` and `outcomes` (N,), as the table's index gave them. Throws std::bad_alloc, and what a
  /// custom initializer throws. Cost: nothing, but for initial rows a pass over the keys and a row
  /// for each that has none.
  DefaultReader(const Table::Impl& table, std::span<const RowNumber> rows,
                std::span<const Outcome> outcomes);
  DefaultReader(const DefaultReader&) = delete;
  DefaultReader& operator=(const DefaultReader&) = delete;

  /// (N,): where each key's row is, among the table's rows or these.
  const RowNumber* rows() const noexcept { return made_.empty() ? given_ : made_.data(); }
  const DefaultRows& defaults() const noexcept { return defaults_; }

 private:
  void make_initial(const Table::Impl& table, std::span<const RowNumber> rows,
                    std::span<const Outcome> outcomes);

  void call_custom(const Table::Impl& table, const std::vector<Key>& keys);

  const RowNumber* given_;
  std::vector<RowNumber> made_;  // or empty: as given
  Buffer<std::byte> memory_;
  std::byte* slab_ = nullptr;
  DefaultRows defaults_;
};

}  // namespace recsdk::internal
