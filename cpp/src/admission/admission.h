// Which new keys get a row: a rule over how often they were seen, and the counts that it needs.
//
// Counts of keys without a row are records, in slabs that never move. With a limit, the records of
// each group of keys are a list in the order of the steps that saw them last. Those of one step are
// in any order until the first of them must leave: then they are sorted by the fixed hash.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "admission/count_sketch.h"
#include "keymap/key_map.h"
#include "recsdk/policy.h"
#include "recsdk/types.h"
#include "util/hash.h"

namespace recsdk::internal {

/// What one call changes of the records.
struct AdmissionCall {
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  /// A key of the call that has no row.
  struct Seen {
    Key key = 0;
    std::size_t place = 0;         // of its first occurrence
    std::int64_t count = 0;        // in this call
    std::int64_t clicks = 0;       // in this call
    std::int64_t total = 0;        // with those before, as far as the rule asks
    std::int64_t all_clicks = 0;   // with those before
    std::int64_t sketched = 0;     // as the sketch counts it
    std::int64_t in_step = 0;      // in the step up to and with this call
    std::int64_t step_clicks = 0;  // the same
    std::uint32_t record = kNone;  // its record
    bool is_admitted = false;
  };
  /// What the step has brought of a key.
  struct InStep {
    Key key = 0;
    std::int64_t count = 0;
    std::int64_t clicks = 0;
  };
  using Counts = std::vector<InStep>;
  using Words = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // of a sketch, by cell

  std::vector<Seen> seen;              // ascending by key
  std::vector<std::uint32_t> added;    // of seen: those whose record is new
  std::vector<std::uint32_t> victims;  // records that leave for them
  Counts in_step;                      // of the step up to and with this call, ascending
  Words before_step;  // what the step up to and with this call changes, as it was before, ascending
  std::int64_t step = 0;
  bool is_prepared = false;
  bool shares_step = false;  // more calls of this step may follow
};

/// The rule of one index, and its records. The index's lock guards it.
class Admission {
 public:
  /// `groups` of max_rows, if it has some; see AdmitConfig.
  Admission(const AdmitConfig& config, std::optional<std::int64_t> groups,
            std::optional<GroupRange> owned, std::uint64_t hash_seed);

  /// What comes with the keys of a call, as in KeyData.
  struct Brought {
    std::span<const std::int64_t> counts;
    std::span<const std::int64_t> clicks;
  };
  /// Of the keys (N,) left kMissing, those that the rule keeps out become kNotAdmitted. Returns
  /// whether there are any. Throws std::bad_alloc; then nothing has changed.
  bool decide(std::span<const Key> keys, Outcome* outcomes, const Brought& brought,
              std::int64_t step, AdmissionCall& call) const;
  /// Whether the rule takes clicks, and whether it needs them.
  bool takes_clicks() const noexcept { return takes_clicks_; }
  bool needs_clicks() const noexcept { return needs_clicks_; }
  /// Makes sure that settle of these outcomes cannot fail. Keys that were let in and found no room
  /// stay counted. `shares_step`: more calls of this step may follow. Throws std::bad_alloc,
  /// Error(kOutOfMemory) or Error(kCapacity); then undo the call.
  void prepare(const Outcome* outcomes, AdmissionCall& call, bool shares_step);
  /// Takes back what a prepared call has readied.
  void undo(const AdmissionCall& call) noexcept;
  /// Counts the keys of a call; those that got a row by it need no record any more. What it changes
  /// is added to `before`, which has room for num_changes.
  void settle(AdmissionCall& call, const Outcome* outcomes,
              std::vector<AdmitRecord>* before) noexcept;
  static std::size_t num_changes(const AdmissionCall& call) noexcept {
    return call.seen.size() + call.victims.size() + call.before_step.size();
  }

  /// The key's record goes, if it has one.
  void forget(Key key) noexcept;
  void clear() noexcept;
  /// Without records.
  std::unique_ptr<Admission> empty_copy() const {
    return std::unique_ptr<Admission>(new Admission(*this, EmptyCopy()));
  }
  /// Throws std::invalid_argument, begun by `title`, for records that cannot be of this rule or are
  /// of one key.
  void check(std::span<const AdmitRecord> records, const std::string& title) const;
  /// Of an empty one: takes in records that it has checked. Throws std::bad_alloc.
  void assign(std::span<const AdmitRecord> records);
  /// Takes the records of another, and what it has lost of them.
  void replace_by(Admission& other) noexcept;

  /// All records, ascending by key; of keys in `before` as they are there, the first one counting.
  /// Throws std::bad_alloc.
  std::vector<AdmitRecord> records(std::span<const AdmitRecord> before) const;
  /// How often a key was seen, about with a sketch, as `records` have it.
  std::optional<std::int64_t> seen_of(Key key, std::span<const AdmitRecord> records) const;

  /// The latest step of a record; INT64_MIN if there is none.
  std::int64_t latest_step() const noexcept;
  std::int64_t size() const noexcept { return map_.size(); }
  std::uint64_t num_lost() const noexcept { return num_lost_; }
  std::int64_t bytes() const;
  /// Whether records stand for words of a sketch, and not for their keys.
  bool has_sketch() const noexcept { return sketch_.has_value(); }
  /// What is broken, or empty. `rows` are the keys that have a row.
  std::string find_broken(const KeyMap& rows) const;

 private:
  struct EmptyCopy {};
  struct Record {
    Key key = 0;
    std::int64_t step = 0;
    std::uint32_t count = 0;
    std::uint32_t previous = AdmissionCall::kNone;
    std::uint32_t next = AdmissionCall::kNone;
    std::uint32_t clicks : 31 = 0;
    bool is_seen : 1 = false;  // by the call that is prepared
  };
  struct Group {
    std::uint32_t first = AdmissionCall::kNone;  // seen longest ago
    std::uint32_t last = AdmissionCall::kNone;
    std::uint32_t used = 0;
    std::uint32_t quota = 0;
    std::optional<std::int64_t> sorted_step;  // records up to it are sorted by (step, hash)
  };
  struct Candidate {
    std::uint32_t group;
    std::uint64_t hash;
    std::uint32_t seen;

    friend auto operator<=>(const Candidate&, const Candidate&) = default;
  };
  static constexpr std::uint32_t kNone = AdmissionCall::kNone;
  static constexpr std::uint32_t kSlabRecords = 1 << 10;
  static constexpr std::uint32_t kMaxClicks = 0x7FFFFFFF;  // of the 31 bits of a record

  Admission(const Admission& other, EmptyCopy tag);

  static std::uint64_t hash_of(Key key) noexcept {
    return virtual_shard_hash(static_cast<std::uint64_t>(key));
  }
  static std::int64_t add(std::int64_t a, std::int64_t b) noexcept {
    std::int64_t sum = 0;
    return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::int64_t>::max() : sum;
  }
  static std::uint32_t kept_clicks(std::int64_t clicks) noexcept {
    return static_cast<std::uint32_t>(std::min(clicks, kMostAdmitCount));
  }
  Record& at(std::uint32_t number) const noexcept {
    return slabs_[number / kSlabRecords][number % kSlabRecords];
  }
  std::uint32_t group_of_hash(std::uint64_t hash) const noexcept {
    return static_cast<std::uint32_t>((hash & 0xFFFFU) >> shift_);
  }
  void gather(std::span<const Key> keys, const Outcome* outcomes, const Brought& brought,
              AdmissionCall& call) const;
  void find_records(AdmissionCall& call) const;
  bool admits(const AdmissionCall::Seen& seen, std::int64_t step) const;
  bool holds(std::size_t place, const AdmissionCall::Seen& seen, std::int64_t step) const;
  std::vector<std::uint32_t> choose_added(const Outcome* outcomes, AdmissionCall& call);
  std::uint32_t choose_victims(Group& group, std::uint32_t count, AdmissionCall& call);
  std::uint32_t sort_run(Group& group, std::uint32_t first);
  void count_step(AdmissionCall& call) const;
  std::int64_t sketched_before(Key key, std::int64_t step) const;
  void prepare_sketch(AdmissionCall& call);
  void settle_sketch(AdmissionCall& call, const Outcome* outcomes,
                     std::vector<AdmitRecord>* before) noexcept;
  void prepare_take(std::size_t count);
  std::uint32_t take() noexcept;
  void give_back(std::uint32_t number) noexcept;
  void link(std::uint32_t number) noexcept;
  void unlink(std::uint32_t number) noexcept;
  void drop(std::uint32_t number) noexcept;
  AdmitRecord of(std::uint32_t number) const noexcept {
    return {at(number).key, at(number).count, at(number).step, at(number).clicks};
  }

  AdmitConfig config_;
  std::int64_t most_ = 0;       // what records count up to; 0: the rule needs none
  bool looks_at_step_ = false;  // a term goes by all that the step brings
  bool takes_clicks_ = false;
  bool keeps_clicks_ = false;  // in records
  bool needs_clicks_ = false;
  bool is_limited_ = false;
  int shift_ = 16;
  std::uint64_t hash_seed_;
  KeyMap map_;  // to the numbers of records
  std::vector<std::unique_ptr<Record[]>> slabs_;
  std::uint32_t end_ = 0;  // one past the highest number ever taken
  std::uint32_t first_free_ = AdmissionCall::kNone;
  std::uint32_t num_free_ = 0;
  std::vector<Group> groups_;
  std::uint64_t num_lost_ = 0;
  std::optional<CountSketch> sketch_;
  // What this step's calls have seen so far of keys that have no row yet, for draws and the sketch,
  // and the words of the sketch that they changed, as they were before.
  AdmissionCall::Counts in_step_;
  AdmissionCall::Words before_step_;
  std::optional<std::int64_t> step_of_counts_;
};

/// Throws std::invalid_argument naming the field that is wrong; `title` begins the message.
/// `groups` of max_rows, if it has some.
void check_admission(const AdmitConfig& config, const std::string& title,
                     std::optional<std::int64_t> groups);

}  // namespace recsdk::internal
