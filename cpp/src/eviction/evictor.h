// Which keys of a full group leave: those that are lowest by (order, fixed hash), found lazily.
//
// Of each group, candidates below a border lie in a sorted run and a small heap, under the order
// that they had when they were filed; all other rows are members, unsorted, at or above the border.
// Orders rise as keys are seen, so a candidate that comes up is looked at again and filed anew if
// it has risen. Scores may fall, and shows and clicks that decay are rounded: then the row is filed
// a second time. Rows that a look has measured are filed anew, see refile.cc. When candidates run
// out, one pass over the members takes their lower half. So a victim costs a few looks at records,
// whatever the size of its group. Keys younger than min_age wait in the order in which they came,
// and are filed once they are old enough: a call that cannot evict them does not look at them.
//
// Rows that are erased stay filed until they come up, and are then found to have no key, or another
// one. A row that is filed more than once does no harm: it leaves once. Groups in which no row was
// erased are not searched for such rows.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eviction/capacity.h"
#include "eviction/row_kinds.h"
#include "eviction/row_meta.h"
#include "recsdk/leavers.h"
#include "rows/row_bits.h"
#include "rows/row_numbers.h"

namespace recsdk::internal {

class Evictor {
 public:
  /// A key that leaves, and its row.
  struct Victim {
    Key key = 0;
    std::uint32_t row = 0;
    LeaveCause cause = LeaveCause::kEvicted;

    friend auto operator<=>(const Victim&, const Victim&) = default;
  };

  Evictor(const EvictConfig& config, std::int64_t num_groups);

  const RowMeta& meta() const noexcept { return meta_; }
  /// Where rows stand by a function of `now`; null for other rules.
  RowKinds* kinds() noexcept { return kinds_ ? &*kinds_ : nullptr; }
  const RowKinds* kinds() const noexcept { return kinds_ ? &*kinds_ : nullptr; }
  /// Where the row stands among others, but for those that stand alike.
  std::uint64_t order(std::uint32_t row, const RowNumbers& numbers) const noexcept {
    const std::int64_t* const words = numbers.meta(row);
    return kinds_ ? RowMeta::measured_order(kinds_->place(row, words)) : meta_.order(words);
  }

  /// Files all rows anew if they are not all filed. To be called before a call inserts others.
  /// Throws std::bad_alloc.
  void refresh(const RowNumbers& numbers, const Capacity& capacity) {
    if (is_lost_) scan(numbers, capacity);
  }
  /// Until end_call: as many rows may be marked, and the keys of `fresh` rows are about to come.
  /// `is_new_step`: no call of this step was before. Throws std::bad_alloc.
  void begin_call(const RowNumbers& numbers, std::span<const std::uint32_t> fresh,
                  std::size_t num_marks, bool is_new_step);
  /// Rows that are marked are not chosen, and those chosen are marked.
  void mark(std::int64_t row) noexcept;
  bool is_marked(std::int64_t row) const noexcept { return marked_.test(row); }
  void end_call() noexcept;
  /// Where a row stands among those of its group.
  struct Place {
    std::uint64_t order = 0;
    std::uint64_t hash = 0;

    friend auto operator<=>(const Place&, const Place&) = default;
  };
  Place place(std::uint32_t row, const RowNumbers& numbers) const noexcept;

  /// Asks for what choose will look at first of a group.
  void prefetch(std::uint32_t number) const noexcept;
  /// Adds the `count` lowest rows of the group that may leave in this step, or in any if there is
  /// none, to `victims`, ascending; returns how many there were. They are no longer filed. Throws
  /// std::bad_alloc; then all rows will be filed anew.
  std::uint32_t choose(Capacity::Excess excess, std::optional<std::int64_t> step,
                       const RowNumbers& numbers, const Capacity& capacity,
                       std::vector<Victim>& victims);
  /// The call failed: files victims again, and forgets what it found.
  void undo_call(std::span<const Victim> victims, const RowNumbers& numbers,
                 const Capacity& capacity) noexcept;
  /// Files rows that have come, by the hashes of their keys. Their metadata are written.
  void add(std::span<const std::uint32_t> rows, std::span<const std::uint64_t> hashes,
           const RowNumbers& numbers, const Capacity& capacity) noexcept;
  /// The key's order has fallen.
  void note_fallen(std::uint32_t row, const RowNumbers& numbers, const Capacity& capacity) noexcept;
  /// A key was erased, and is not counted any more.
  void note_erased(Key key, const RowNumbers& numbers, const Capacity& capacity) noexcept;
  /// Any order may be another now, of the same rows.
  void unsort() noexcept;
  /// A look has measured these rows, ascending, whose orders are others now: files them anew.
  void refile(std::span<const Measured> measured, const RowNumbers& numbers,
              const Capacity& capacity) noexcept;
  /// A number that about twice as many rows are below as have left since all were filed anew, going
  /// by some of them: of each `stride` rows what a look finds of one.
  float likely_border(std::span<float> found, std::size_t stride) const noexcept;
  /// To be set for the rows that a look at all finds below such a number, before refile_all. Throws
  /// std::bad_alloc.
  RowBits& low_rows(const RowNumbers& numbers);
  /// A look has measured all rows, and these are below: files all anew. Clears low_rows.
  void refile_all(float border, const RowNumbers& numbers, const Capacity& capacity) noexcept;
  /// All rows are others now.
  void forget() noexcept;

  std::int64_t bytes() const noexcept;
  /// What is wrong, empty if nothing is.
  std::string find_broken(const RowNumbers& numbers, const Capacity& capacity) const;

 private:
  struct Filed {
    Place place;
    std::uint32_t row = 0;

    friend bool operator<(const Filed& a, const Filed& b) noexcept { return a.place < b.place; }
    friend bool operator>(const Filed& a, const Filed& b) noexcept { return b < a; }
  };
  struct Young {
    std::int64_t born = 0;
    std::uint32_t row = 0;

    friend auto operator<=>(const Young&, const Young&) = default;
  };
  struct Group {
    std::vector<Filed> run;  // descending
    std::vector<Filed> heap;
    std::vector<std::uint32_t> members;
    std::vector<Young> young;  // ascending by born, from num_grown on
    std::size_t num_grown = 0;
    Place border;                          // members are not below
    std::uint32_t num_stale = 0;           // times that a row is filed in vain, at most
    std::optional<std::int64_t> spent_in;  // the step in which no more of its keys may leave
  };

  /// Rows of a group that are filed elsewhere from now on, and where some of them were.
  struct Shift {
    std::uint32_t count = 0;
    std::uint32_t num_candidates = 0;
    std::uint32_t num_members = 0;
  };
  struct Shifts {
    std::vector<Filed> entries;         // their rows are marked
    std::vector<std::uint32_t> groups;  // of each
    std::vector<Shift> of_groups;
  };

  Filed filed(std::uint32_t row, const RowNumbers& numbers) const noexcept;
  void prefetch_filed(std::uint32_t row, const RowNumbers& numbers) const noexcept {
    numbers.prefetch_key(row);
    kinds_ ? kinds_->prefetch(row) : numbers.prefetch_meta(row);
  }
  bool is_there(const Filed& entry, const RowNumbers& numbers) const noexcept;
  bool is_of(std::uint32_t row, std::uint32_t number, const RowNumbers& numbers,
             const Capacity& capacity) const noexcept;
  static void file(Group& group, const Filed& entry);
  static void unsort(Group& group);
  bool is_waiting(const Group& group, std::uint32_t row, const RowNumbers& numbers) const noexcept;
  void add_shift(const Filed& entry, std::size_t number, bool was_candidate, Shifts& shifts);
  void find_shifts(std::span<const Measured> measured, const RowNumbers& numbers,
                   const Capacity& capacity, Shifts& shifts);
  static void sort_by_group(Shifts& shifts);
  void take_out(Group& group, const Shift& shift);
  void part_members(std::vector<std::uint32_t>& members);
  void refile_group(std::uint32_t number, const RowNumbers& numbers, const Capacity& capacity);
  static void file_all(Group& group, std::span<Filed> entries);
  void file_grown(Group& group, std::uint32_t number, std::optional<std::int64_t> step,
                  const RowNumbers& numbers, const Capacity& capacity);
  void take_victims(Group& group, std::uint32_t number, std::size_t wanted,
                    std::optional<std::int64_t> step, const RowNumbers& numbers,
                    const Capacity& capacity);
  bool take_lowest(Group& group);
  void pass(Group& group, std::uint32_t number, const RowNumbers& numbers,
            const Capacity& capacity);
  void add_stale(std::uint32_t number, const RowNumbers& numbers, const Capacity& capacity);
  void scan(const RowNumbers& numbers, const Capacity& capacity);

  const RowMeta meta_;
  std::optional<RowKinds> kinds_;
  std::vector<Group> groups_;
  RowBits marked_;
  RowBits fresh_;  // whose rows may still be filed for keys that were erased
  std::vector<std::uint32_t> fresh_rows_;
  std::vector<std::uint32_t> marked_rows_;
  std::vector<Filed> scratch_;
  std::vector<std::uint32_t> low_;
  std::vector<Filed> chosen_;
  std::vector<Filed> passed_over_;
  std::size_t num_chosen_ = 0;  // since all rows were filed anew
  bool is_lost_ = false;        // not all rows are filed, since they are others or memory ran out
  bool is_new_step_ = false;    // of the call
  bool has_stale_ = false;      // some group has, or had, rows that are filed in vain
};

}  // namespace recsdk::internal
