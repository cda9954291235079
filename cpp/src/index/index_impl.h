// The state behind an Index, its lock, and the steps that its calls are made of.
//
// `mutex` guards all of it. Mapping with insertion and erasing hold it alone. Finding shares it. A
// batch in flight ends under it too, if need be when it is taken next: who releases a lease does
// not wait. A maker of rows may have locks of its own, which are taken after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "admission/admission.h"
#include "eviction/capacity.h"
#include "eviction/churn.h"
#include "eviction/evictor.h"
#include "eviction/unmeasured.h"
#include "index/calls.h"
#include "index/change_tracker.h"
#include "keymap/key_map.h"
#include "recsdk/index.h"
#include "recsdk/key_metadata.h"
#include "rows/leaver_queue.h"
#include "rows/row_numbers.h"
#include "util/apart.h"
#include "util/fair_mutex.h"

namespace recsdk {

struct Lease::Impl {
  std::shared_ptr<Index::Impl> index;
  std::shared_ptr<internal::LeaseRecord> record;
};

struct Index::Impl {
  Impl(IndexConfig index_config, std::string title_of_messages,
       std::shared_ptr<RowMaker> maker_of_rows);

  const IndexConfig config;
  const std::string title;  // "table 'user_id'", the start of every message
  const std::uint64_t hash_seed;
  std::shared_ptr<RowMaker> maker;  // or null; as long as the index itself lives

  mutable internal::FairMutex mutex;
  internal::KeyMap key_map;
  internal::RowNumbers numbers;
  std::optional<internal::Capacity> capacity;      // with max_rows
  std::optional<internal::Evictor> evictor;        // with eviction
  std::optional<internal::Unmeasured> unmeasured;  // if looks need not measure all rows
  std::optional<internal::Admission> admission;
  std::uint64_t num_admitting_calls = 0;  // of batches in flight
  std::optional<internal::Churn> churn;   // with eviction that asks for it
  bool is_mostly_new = false;             // half or more of the keys inserted last had no row yet
  std::uint64_t next_epoch = 0;
  std::optional<std::int64_t> last_step;
  std::map<std::uint64_t, std::shared_ptr<internal::LeaseRecord>> open_leases;  // by epoch
  std::deque<std::shared_ptr<internal::LeaseRecord>>
      open_steps;                  // with a step, in order; until visible
  std::int64_t num_in_flight = 0;  // keys that readers do not see yet
  std::uint64_t num_erased = 0;
  // With eviction.
  std::int64_t num_leaving = 0;  // rows whose key was evicted by a batch that is not visible yet
  std::uint64_t num_evicted = 0;
  std::uint64_t num_expired = 0;
  std::uint64_t num_returned = 0;
  internal::EvictionClock clock;
  bool had_leases = false;  // with a step, before all keys were replaced
  mutable internal::AtomicCounts outcome_counts{};

  // While somebody reads what leaves. A table copies its rows out.
  std::shared_ptr<internal::LeaverQueue> leavers;
  std::function<void(internal::LeaverQueue&, std::uint64_t)> copy_left;  // LeaverQueue::copy_before
  // Whether the release of a lease waits for the mutex: a reader of what leaves is open, or new
  // rows of batches in flight begin with the shared rows as they are when these batches end.
  std::atomic<bool> ends_at_once{false};

  // From the first cut or replacement on; of a table changed under its rows' lock too, and read
  // under either.
  std::unique_ptr<internal::ChangeTracker> tracker;
  bool has_parent = false;   // there is a save that changes can build on
  bool is_cut = false;       // a cut is open
  bool is_of_table = false;  // which replaces and cuts keys together with its rows

  /// A row's weights change, or those of sorted items [begin, end); its lock is held.
  void note_weights(std::int64_t row) noexcept {
    if (tracker != nullptr) tracker->note_changed(row);
    if (follows_weights()) unmeasured->note(row);
  }
  void note_weights(const internal::GradItem* items, std::int64_t begin,
                    std::int64_t end) noexcept {
    if (tracker != nullptr) tracker->note_changed(items, begin, end);
    if (follows_weights()) unmeasured->note(items, begin, end);
  }
  /// Makes sure that rows below `end` can be noted as not measured. Throws std::bad_alloc.
  void let_measure(RowNumber end) {
    if (unmeasured) unmeasured->grow(end);
    if (evictor && evictor->kinds() != nullptr) evictor->kinds()->grow(end);
  }
  bool follows_weights() const noexcept { return unmeasured && evictor->meta().is_by_norm(); }

  int max_threads() const;

  // By key; the mutex is held (alone where not const).
  void find(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const;
  void find_visible(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const;
  /// Says what stands in place of the row numbers of keys without a row.
  void point_to_defaults(std::span<const Key> keys, RowNumber* rows_out,
                         const Outcome* outcomes) const noexcept;
  std::int64_t num_visible() const noexcept { return key_map.size() + num_leaving - num_in_flight; }
  void find_or_insert(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  void undo(internal::Insertion& insertion) noexcept;
  /// Index::map, once its arguments are checked. Takes the mutex. `end`: a call under which row
  /// numbers reach it throws, absent: none does.
  void map(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
           const MapOptions& options, std::optional<RowNumber> end);
  void require_below(RowNumber end) const;
  void map_inserting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                     internal::LeaseRecord* record, const KeyData& data,
                     const internal::Then& then = {}, bool admits_all = false);
  /// What follows an insertion that stays.
  void settle(const internal::Insertion& insertion) noexcept;
  // With eviction an insertion begins, is prepared, and settles in these too. `record` if it is
  // part of a batch in flight, else null.
  void begin_insertion(std::size_t num_keys, internal::Insertion& insertion,
                       const internal::LeaseRecord* record, const KeyData& data) const;
  /// The clock's time once a call with these keys is done.
  std::optional<std::int64_t> time_after(std::size_t num_keys, const KeyData& data) const;
  /// The step that a batch of this lease's step is, or a call without one.
  std::int64_t step_of(std::optional<std::int64_t> lease_step) const;
  /// Whether this step begins with a look at all keys.
  bool is_look_due(std::int64_t step) const noexcept {
    return clock.is_begun && evictor->meta().is_due(clock.step, step);
  }
  void require_trained(std::optional<std::int64_t> lease_step) const;
  void prepare_eviction(std::span<const Key> keys, const Outcome* outcomes,
                        internal::Insertion& insertion, internal::LeaseRecord* record);
  void settle_eviction(std::span<const Key> keys, const RowNumber* rows_in, const Outcome* outcomes,
                       internal::Insertion& insertion, internal::LeaseRecord* record) noexcept;
  /// Whether it counts steps.
  bool has_clock() const noexcept { return evictor || admission; }
  void advance_clock(const internal::Insertion& insertion, internal::LeaseRecord* record) noexcept;
  void prepare_admission(const Outcome* outcomes, internal::Insertion& insertion,
                         internal::LeaseRecord* record);
  void settle_admission(const Outcome* outcomes, internal::Insertion& insertion,
                        internal::LeaseRecord* record) noexcept;
  /// Counts of keys without a row as readers see them, ascending by key. Throws std::bad_alloc.
  std::vector<AdmitRecord> visible_records() const;
  std::int64_t evict(std::int64_t max_rows, bool is_dry = false);
  /// The keys that `choose` picks, of those that may leave.
  std::vector<internal::Evictor::Victim> choose_where(const ChooseLeaving& choose);
  std::int64_t evict_chosen(std::span<const internal::Evictor::Victim> chosen);
  /// The keys that have expired as of the last step, and may leave in this one, by row number.
  /// `told`: the time; absent: the clock's.
  std::vector<internal::Evictor::Victim> find_expired(std::int64_t step,
                                                      std::optional<std::int64_t> told) const;
  void add_share(double share, std::int64_t step, std::int64_t now,
                 std::vector<internal::Evictor::Victim>& expired) const;
  std::int64_t expire(bool is_dry = false);
  /// True while somebody reads what leaves; lets go of a reader that is closed.
  bool has_reader() noexcept;
  /// From here on somebody does. Throws Error(kBusy) if there is one, or steps are in flight.
  void open_reader(std::shared_ptr<internal::LeaverQueue> queue,
                   std::function<void(internal::LeaverQueue&, std::uint64_t)> copy);
  void close_reader() noexcept;
  /// The words of `count` rows, ascending, as readers see them: without batches in flight. Throws
  /// std::bad_alloc.
  std::vector<std::int64_t> visible_meta(const internal::RowBits& rows, std::int64_t count) const;
  /// The clock as readers see it.
  EvictionState visible_state() const noexcept;
  void set_state(const EvictionState& state) noexcept;
  template <typename Body>
  void for_each_meta(const Body& body) const noexcept;
  std::int64_t latest_step() const noexcept;
  std::optional<std::int64_t> latest_time() const noexcept;
  void require_no_steps(const char* call) const;
  void require_open(const internal::LeaseRecord* record) const;
  /// Throws Error(kBusy) unless keys may be replaced; `what` names the call in the message.
  void require_idle(const char* what) const;
  void require_alone(const char* call) const;
  void erase(std::span<const Key> keys, Outcome* outcomes);  // or null
  void clear();
  /// `record_bytes`: what each row takes elsewhere, to be reserved next.
  void reserve(std::int64_t num_rows, std::int64_t record_bytes);
  /// Throws Error(kOutOfMemory) if the system has less memory than that will take.
  void require_memory(std::int64_t num_rows, std::int64_t record_bytes) const;
  void count(const internal::OutcomeCounts& counts) const noexcept {
    internal::add_counts(outcome_counts, counts);
  }
  void end(internal::LeaseRecord& record) noexcept;
  void drop_maker() noexcept;
  void note_visible(std::span<const std::uint32_t> row_numbers) noexcept;
  /// Exchanges all keys and what tells changes, which are tracked from here on.
  void replace(internal::KeyMap& other_map, internal::RowNumbers& other_numbers,
               std::unique_ptr<internal::ChangeTracker>& other_tracker) noexcept;
  /// Index::assign. With eviction `words` are the metadata of keys (N, words), or empty: they
  /// count as never seen; with admission these are the records; and the clock is set.
  void assign(std::span<const Key> keys, std::span<const std::int64_t> words,
              const EvictionState& state, std::span<const AdmitRecord> records);
  /// Admission that has counted nothing, if there is a rule. Takes the mutex: others replace
  /// counts.
  std::unique_ptr<internal::Admission> empty_admission() const;
  /// Admission with these records, of keys that `rows` has not; null without admission. Throws
  /// std::invalid_argument for records that do not fit, and std::bad_alloc.
  std::unique_ptr<internal::Admission> counted_anew(const internal::KeyMap& rows,
                                                    std::span<const AdmitRecord> records) const;
  /// Throws Error(kCapacity) if the keys that have these rows find no room.
  void check_room(const internal::RowNumbers& other_numbers) const;
  /// From here on `fresh` tells changes; returns what told them before.
  std::unique_ptr<internal::ChangeTracker> begin_cut(
      std::unique_ptr<internal::ChangeTracker> fresh) noexcept;
  /// Ends a cut; `before` told changes up to it. Returns the tracker that is of no more use.
  std::unique_ptr<internal::ChangeTracker> end_cut(std::unique_ptr<internal::ChangeTracker> before,
                                                   bool durable) noexcept;

  void add_stats(IndexStats& stats) const;
  void check_invariants() const;

  // These take the mutex, but `release` does not if this thread is in a callback under it.
  static Lease take_lease(const std::shared_ptr<Impl>& index, std::optional<std::int64_t> step);
  void release(internal::LeaseRecord& record) noexcept;

  // Checks of arguments: throw std::invalid_argument, hold no lock.
  std::shared_ptr<internal::LeaseRecord> check_lease(const Lease* lease) const;
  void check_sizes(std::size_t num_keys, std::size_t num_outcomes) const;
  void check_rows(std::size_t num_keys, std::size_t num_rows) const;
  void check_apart(std::span<const Key> keys, const internal::CallArray& written,
                   std::span<const Outcome> outcomes, const KeyData& data) const;
  /// Of outcomes that may be absent; they lie over nothing that is `beside` either.
  void check_outcomes(std::span<const Key> keys, std::span<const Outcome> outcomes,
                      std::initializer_list<internal::CallArray> beside = {}) const;
  void check_data(std::size_t num_keys, const KeyData& data, bool insert,
                  bool admits_all = false) const;
  void check_time(const char* name, std::optional<std::int64_t> time) const;
  void check_counts(std::size_t num_keys, const KeyData& data, bool insert) const;
  void check_clicks(std::size_t num_keys, const KeyData& data, bool insert, bool admits_all) const;
  bool is_by_show_click() const noexcept;
  void check_admits_all(const MapOptions& options) const;

 private:
  int shard_bits_for(std::size_t num_keys) const;
  std::size_t piece_of(int shard_bits) const;
  void insert_fitting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  void insert_admitted(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                       internal::RowState state, internal::Insertion& insertion);
  void check_defaults(std::span<const Key> keys, const Outcome* outcomes) const;
  void measure(internal::Insertion& insertion);
  void note_unmeasured(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                       const internal::Insertion& insertion) noexcept;
  template <typename Found>
  void keep_found(std::span<const std::uint32_t> rows, const Found& found,
                  internal::Insertion& insertion);
  void measure_norms(std::span<const std::uint32_t> rows, internal::Insertion& insertion);
  void ask_function(const internal::Columns& columns, std::vector<float>& places);
  void place_rows(std::span<const std::uint32_t> rows, internal::Insertion& insertion);
  void place_kinds(internal::Insertion& insertion);
  float mark_low();
  void take_back_measured(internal::Insertion& insertion) noexcept;
  void note_measured(const internal::Insertion& insertion, internal::LeaseRecord* record) noexcept;
  void note_placed(internal::RowKinds::Before& before, internal::LeaseRecord* record) noexcept;
  void note_shifted(const internal::RowKinds::Before& before) noexcept;
  void set_visible_places(std::span<const std::uint32_t> rows, std::span<std::int64_t> words) const;
  void take_expired(std::span<const Key> keys, internal::Insertion& insertion);
  void insert_into_room(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                        internal::RowState state, internal::Insertion& insertion);
  void insert_limited(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  void insert_found(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                    internal::RowState state, internal::Insertion& insertion);
  void insert_evicting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                       internal::RowState state, internal::Insertion& insertion);
  void refuse_lowest(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                     internal::RowState state, internal::Insertion& insertion,
                     std::span<const internal::Capacity::Excess> lacking);
  std::vector<internal::Capacity::Excess> choose_victims(
      std::vector<internal::Capacity::Excess>& excess, internal::Insertion& insertion);
  void begin_meta(const internal::Insertion& insertion) noexcept;
  template <typename Body>
  void for_touched(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                   const Body& body) const noexcept;
  template <typename Touch>
  void touch_in_flight(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                       std::int64_t step, internal::LeaseRecord& record,
                       const Touch& touch) noexcept;
  template <typename Touch>
  void touch_all(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
                 std::int64_t step, internal::LeaseRecord* record, const Touch& touch) noexcept;
  void touch(std::size_t num_keys, const RowNumber* rows_in, const Outcome* outcomes,
             const internal::Insertion& insertion, internal::LeaseRecord* record) noexcept;
  void evict_rows(std::span<const internal::Evictor::Victim> victims, std::int64_t step,
                  internal::LeaseRecord* record) noexcept;
  void count_returned(const internal::Insertion& insertion, internal::LeaseRecord* record) noexcept;
  void count_left(LeaveCause cause) noexcept {
    ++(cause == LeaveCause::kExpired ? num_expired : num_evicted);
  }
  static void hash_new(std::span<const Key> keys, const Outcome* outcomes,
                       internal::Insertion& insertion);
  std::optional<std::uint32_t> find_leaving(Key key) const noexcept;
  void publish_evicted(const internal::LeaseRecord& record) noexcept;
  void take_back_rows(const internal::Insertion& insertion) noexcept;
  [[noreturn]] void throw_full(const internal::Capacity::FullGroup& full) const;
  void insert_alone(std::span<const Key> keys, std::size_t num_missing, RowNumber* rows_out,
                    Outcome* outcomes, internal::RowState state, internal::Insertion& insertion);
  void insert_sharded(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion, int shard_bits);
  bool insert_new(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                  internal::RowState state, internal::Insertion& insertion);
  void insert_missing(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      internal::RowState state, internal::Insertion& insertion);
  void insert_chunk(const Key* keys, std::span<const std::uint16_t> missing, RowNumber* rows_out,
                    Outcome* outcomes, internal::RowState state, internal::Insertion& insertion);
  void prepare(RowNumber end, std::span<const std::uint32_t> reused);
  void prepare_missing(std::int64_t count);
  void populate_ahead(std::int64_t num_new) noexcept;
  Outcome erase_one(Key key) noexcept;
  std::int64_t reserve_places(std::span<const Key> keys);
  void prepare_erasing(std::span<const Key> keys);
  void note_leaving(std::int64_t num_places, const internal::Then& note);
  void note_left(Key key, std::uint32_t row, LeaveCause cause) noexcept;
  void publish_released() noexcept;
  void release_kept_rows() noexcept;
};

/// Lets makers of rows, and calls over many indexes, reach what an Index hides.
struct IndexAccess {
  static Index make(std::shared_ptr<Index::Impl> impl) { return {Index::Adopt{}, std::move(impl)}; }
  static Index::Impl& impl(const Index& index) { return *index.impl_; }
  static const std::shared_ptr<Index::Impl>& share(const Index& index) { return index.impl_; }
};

}  // namespace recsdk
