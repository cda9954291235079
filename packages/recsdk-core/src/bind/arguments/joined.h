// Mapped bags of many tables in one array of each kind.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "arguments/array.h"
#include "arguments/checked.h"
#include "recsdk/table.h"

namespace recsdk::bind {

/// The bags of many tables: pieces one after the other, table by table. Its arrays are checked once
/// and kept alive.
class PyJoinedBags {
 public:
  struct Piece {
    Bags bags;
    std::int64_t start = 0;  ///< where its vectors begin: a number, or a column
  };

  /// Throws ValueError for parts that do not fit each other.
  PyJoinedBags(nb::handle rows, nb::handle outcomes, nb::handle num_pieces, nb::handle num_keys,
               nb::handle starts, nb::handle offsets, nb::handle is_mean);

  Framework framework() const { return framework_; }
  std::int64_t num_tables() const { return static_cast<std::int64_t>(first_pieces_.size()) - 1; }
  std::int64_t num_keys() const { return static_cast<std::int64_t>(rows_.span().size()); }
  std::int64_t num_bags() const;
  /// The pieces of a table.
  std::span<const Piece> pieces_of(std::int64_t table) const;
  /// Checks that no array was resized since. Throws ValueError if one was.
  void require_unmoved() const;

 private:
  void add_pieces(std::span<const std::int64_t> num_keys, std::span<const std::int64_t> starts);
  void add_offsets(nb::handle offsets);
  void add_pooling(nb::handle is_mean);

  std::vector<nb::object> kept_;
  Integers rows_;
  Array outcomes_;
  std::deque<Integers> offsets_;
  Framework framework_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> first_pieces_ = {0};  // of each table, and the one after the last
};

}  // namespace recsdk::bind
