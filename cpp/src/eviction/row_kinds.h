// Where rows stand by a function of `now`, which says something else at each look.
//
// Rows with equal columns are of one kind, and a kind has a place: there are far fewer kinds than
// rows. A look learns the kinds of the rows that came or were seen since the look before, and asks
// the function about each kind that some row has. Of all other rows it reads four bytes, and it
// writes nothing. Between looks kinds and places stay as they are, whichever keys are seen.
//
// A row that came since the latest look, or was loaded, is of no kind yet: it stands where its
// words say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "eviction/alike_rows.h"
#include "eviction/row_meta.h"
#include "rows/row_numbers.h"
#include "rows/slabs.h"
#include "util/prefetch.h"

namespace recsdk::internal {

class RowKinds {
 public:
  /// What a look has changed.
  struct Before {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> rows;  // with their kinds, ascending
    std::vector<float> places;                                  // of kinds, once they have others
    bool has_places = false;
    std::vector<std::uint64_t> shifted;  // rows that stand elsewhere now, as bits; if looked for
  };

  /// `most_kinds`: at least as many as there can be rows.
  explicit RowKinds(const RowMeta& meta, std::size_t most_kinds = kMaxRows);

  /// Makes rows below `num_rows` addressable. Throws std::bad_alloc.
  void grow(std::int64_t num_rows);
  /// Another key has the row.
  void begin(std::int64_t row) const noexcept { kind(row) = kNone; }
  void prefetch(std::int64_t row) const noexcept { prefetch_line(&kind(row)); }
  /// Where a row with these words stands.
  float place(std::int64_t row, const std::int64_t* words) const noexcept {
    return place_of(kind(row), words, places_);
  }
  std::uint32_t kind_of(std::int64_t row) const noexcept { return kind(row); }
  /// Where a row of that kind stood before a look.
  float place_before(std::uint32_t kind, const std::int64_t* words,
                     const Before& before) const noexcept {
    return place_of(kind, words, before.places);
  }

  // The steps of a look. If one of them, or what comes later, fails, take_back undoes them.

  /// Learns the kinds of these rows, ascending; of all others they are known. Throws
  /// std::bad_alloc.
  void learn(std::span<const std::uint32_t> rows, const RowNumbers& numbers, Before& before);
  /// Finds the kinds that some row has. Throws std::bad_alloc.
  void find_used(const RowNumbers& numbers);
  std::size_t num_used() const noexcept { return used_.size(); }
  /// The columns of `most` of these at most, from the `begin`-th on.
  Columns columns(std::size_t begin, std::size_t most) const;
  /// Where each of them stands from now on. Throws std::bad_alloc.
  void set_places(std::span<const float> places, Before& before);
  /// Says which rows stand elsewhere than before. Throws std::bad_alloc.
  void find_shifted(const RowNumbers& numbers, Before& before) const;
  /// Sets the bits of rows below a border, and clears all others. Throws std::bad_alloc before.
  void mark_low(float border, const RowNumbers& numbers, const RowBits& low_rows) const;

  void take_back(Before& before) noexcept;
  /// All rows are others now.
  void forget() noexcept;

  std::int64_t bytes() const noexcept;

 private:
  static constexpr std::uint32_t kNone = 0;
  static constexpr std::int64_t kSlabBytes = std::int64_t{4} << 20;
  static constexpr std::size_t kFewestSlots = 64;

  std::uint32_t& kind(std::int64_t row) const noexcept { return *of_rows_.at<std::uint32_t>(row); }
  float place_of(std::uint32_t kind, const std::int64_t* words,
                 std::span<const float> places) const noexcept {
    return kind == kNone ? meta_.measured(words) : places[kind];
  }
  std::uint32_t find_or_add(const RowMeta::Shown& shown);
  std::uint32_t add(const RowMeta::Shown& shown);
  std::size_t slot_of(const RowMeta::Shown& shown) const noexcept;
  void file_slot(std::uint32_t kind) noexcept;
  void grow_slots();
  std::size_t num_kinds() const noexcept { return columns_.size() - 1 - spare_.size(); }
  void release(std::span<const std::uint32_t> rows, const RowNumbers& numbers);
  std::vector<std::uint32_t> used_now(const RowNumbers& numbers) const;
  void keep_only(std::span<const std::uint32_t> kinds);
  template <typename Body>
  void for_used(const RowNumbers& numbers, const Body& body) const;

  const RowMeta& meta_;
  const std::size_t most_kinds_;
  Slabs of_rows_;
  std::int64_t num_rows_ = 0;
  AlikeColumns columns_;              // of kinds
  std::vector<std::uint32_t> slots_;  // kinds by the hash of their columns; as many as a power of 2
  std::size_t num_filed_ = 0;         // in slots
  std::vector<std::uint32_t> spare_;  // kinds that no row has, and no slot leads to
  std::vector<std::uint32_t> used_;   // kinds that some row had at the latest look, ascending
  std::vector<float> places_;         // of kinds
};

}  // namespace recsdk::internal
