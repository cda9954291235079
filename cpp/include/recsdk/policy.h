// Who gets a row of an index or table, and who loses it: which new keys are admitted, how max_rows
// divides over groups of keys, and the order in which the keys of a full group leave.
//
// The keys of an index fall into groups by the fixed hash that also gives their virtual shard, so
// that a group does not depend on rank, thread, order or hash_seed. Each group has room for an
// equal part of max_rows: a rank that has whole groups decides for itself what all ranks together
// would decide.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "recsdk/export.h"
#include "recsdk/types.h"

namespace recsdk {

/// Groups [begin, end).
struct GroupRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  friend bool operator==(const GroupRange&, const GroupRange&) = default;
};

/// What a key's place in the order of eviction follows from; the lowest leaves first.
enum class EvictOrder : std::uint8_t {
  kLru = 0,    ///< when it was last seen
  kLfu = 1,    ///< how often it was seen
  kScore = 2,  ///< the score that the caller gave it last
  /// how often it was shown, and clicked: alpha * shows + beta * clicks, with decay
  kShowClick = 3,
  /// the norm of its row's weights, the root of the sum of their squares, as the latest look took
  /// it: see EvictConfig::expire_every. Until the first one a key stands above all that have one.
  kLowNorm = 4,
  /// what a function of the caller's made of its columns at the latest look, and before the first
  /// one above all others, as kLowNorm
  kFunction = 5,
  /// alpha * shows + beta * clicks, all that a key had so far added anew by each step that sees it:
  /// the first such step leaves that sum, each later one `decay` of it and of what was there. Where
  /// a share of all leaves, of those that stand alike the smaller key does first
  kShowClickTotals = 6,
};

/// What an index takes for the time.
enum class EvictClock : std::uint8_t {
  kStep = 0,  ///< the step; a call without one counts as the step after the latest
  kTime = 1,  ///< the times that come with keys, see KeyData
};

/// In place of the time of a key of which none is known: no such key expires, and those of kLru
/// leave before all others.
inline constexpr std::int64_t kNoTime = INT64_MIN;

/// What EvictOrder::kFunction is given: what is kept of some keys. Columns that the config does not
/// ask for are empty.
struct EvictColumns {
  std::int64_t now = 0;                  ///< the step of the last call that inserted
  std::span<const std::int64_t> steps;   ///< (n,) the step that saw each key last
  std::span<const std::int64_t> times;   ///< (n,) the largest time that came with it
  std::span<const std::int64_t> counts;  ///< (n,) how often it was seen, up to 2**36
  std::span<const float> scores;         ///< (n,) that the caller gave it last, 0 before
};
/// Writes where keys (n,) stand, numbers that are finite as float; the lowest leaves first.
///
/// What it says of a key must follow from the key's columns and `now` alone: of keys with equal
/// columns it is mostly shown one. It is shown all keys, or with EvictConfig::ignores_now those
/// that are new or were seen, at most 32,768 at a time. It runs under the index's lock and must not
/// call the index. What it throws takes the call back.
using EvictFunction = std::function<void(const EvictColumns& columns, std::span<double> places)>;

/// Which keys leave when others find no room. A key is seen by each of its occurrences in a call
/// that inserts; other calls change nothing.
struct EvictConfig {
  EvictOrder order = EvictOrder::kLru;
  EvictClock clock = EvictClock::kStep;  ///< of kLru and kFunction; of others kStep
  /// Of kLfu: steps, > 0, after which an occurrence counts half. Absent: all count alike for ever.
  std::optional<double> half_life = std::nullopt;
  /// Steps, >= 0, that a key stays at least, counted from the one in which it came.
  std::int64_t min_age = 0;
  /// A key that was not seen for so long expires: steps, or of kTime what its times count, >= 1.
  /// Absent: never. With it, or rare_ttl, eviction needs no max_rows.
  std::optional<std::int64_t> ttl = std::nullopt;
  /// The same of a key that was seen less than rare_count times, >= 2; below ttl. Both or none.
  std::optional<std::int64_t> rare_ttl = std::nullopt;
  std::optional<std::int64_t> rare_count = std::nullopt;
  /// Steps, >= 1, between two looks for keys that have expired: the first call of a step that is a
  /// multiple, or has passed one, looks at all keys. They leave by what the step before left, but
  /// those that the call brings stay. Read only with ttl, rare_ttl, share, kLowNorm or kFunction;
  /// at a look kLowNorm takes the norms of all rows, so the batches before it must have been
  /// trained.
  std::int64_t expire_every = 100;

  /// Of kShowClick and kShowClickTotals: what an occurrence of a key adds, and what a click does.
  /// Each 0, or from 2**-16 to 2**20, in whole numbers of 2**-16; not both 0.
  double alpha = 1.0;
  double beta = 0.0;
  /// Of kShowClick: what a step leaves of what was added before, above 0, up to 1: all of it. Of
  /// kShowClickTotals steps that do not see a key leave all.
  double decay = 1.0;

  /// The part of each group's keys, above 0, up to 1, that leaves at each look, rounded down but
  /// one key at least: the lowest, of those that are old enough. Without max_rows all are a group.
  std::optional<double> share = std::nullopt;

  /// Of kLowNorm: keys whose norm is below leave at each look, above 0. Absent: none do so.
  std::optional<double> below = std::nullopt;

  /// Of kFunction, and what is kept for it beside the step: times by `clock`, counts, scores.
  EvictFunction function = nullptr;
  bool keeps_counts = false;
  bool keeps_scores = false;
  /// The same: what it says of a key follows from the key's columns alone, whatever `now` is. Then
  /// looks show it only keys that came or were seen since the look before.
  bool ignores_now = false;

  /// Steps, >= 1, within which a key that was evicted or has expired counts as returned if it gets
  /// a row again, see IndexStats::returned. Absent: nobody remembers who left.
  std::optional<std::int64_t> churn_steps = std::nullopt;
  /// Keys that left and are remembered, >= 1, divided over groups of keys as
  /// AdmitConfig::max_records is. In a full group the key that left first is forgotten, the lowest
  /// by a fixed hash first of one step. Only with churn_steps.
  std::int64_t churn_records = std::int64_t{1} << 20;

  bool expires() const noexcept {
    return ttl.has_value() || rare_ttl.has_value() || share.has_value() || below.has_value();
  }
};

/// Where the clock of an index with eviction or admission stands: what a save keeps of it.
struct EvictionState {
  std::int64_t step = 0;                                  ///< of the last call that inserted
  std::optional<std::int64_t> lease_step = std::nullopt;  ///< that its lease carried, if any
  bool is_begun = false;                                  ///< there was such a call
  std::optional<std::int64_t> time = std::nullopt;        ///< see Index::time
  /// For copies in memory, which no checkpoint has: there were leases with a step, so that the next
  /// one does not say where the clock begins, also if the table goes back to before the first.
  bool had_leases = false;

  friend bool operator==(const EvictionState&, const EvictionState&) = default;
};

/// One term of a rule of admission.
struct AdmitTerm {
  enum class Kind : std::uint8_t {
    kCount = 0,        ///< the key has been seen `count` times, this step's included
    kProbability = 1,  ///< drawn with `probability` for each time that this step sees the key
    kAll = 2,          ///< both of the two terms before it
    kAny = 3,          ///< one of the two terms before it, or both
    /// alpha times how often the key has been seen, and beta times its clicks, this step's
    /// included, are `threshold` or more
    kShowClick = 4,
    /// as kCount, by a sketch: never later than the `count`th occurrence, and seldom earlier
    kCountSketch = 5,
    /// as kShowClick, by what this step brings alone: nothing is kept of a key without a row
    kShowClickOfStep = 6,
  };
  Kind kind = Kind::kCount;
  std::int64_t count = 1;    ///< 1 to kMostAdmitCount, of kCountSketch to kMostSketchCount
  double probability = 1.0;  ///< above 0, up to 1
  double alpha = 1.0;        ///< finite, 0 or more
  double beta = 0.0;         ///< finite, 0 or more, not both 0
  double threshold = 1.0;    ///< finite, above 0
};

/// Counts of keys without a row end here, clicks too.
inline constexpr std::int64_t kMostAdmitCount = 0x7FFFFFFF;
inline constexpr std::size_t kMostAdmitTerms = 63;
/// What counters of a sketch can count to.
inline constexpr std::int64_t kMostSketchCount = 0x7FFF;
/// The smallest sketch: four counters for each virtual shard.
inline constexpr std::int64_t kFewestSketchBytes = 8 * kNumVirtualShards;

/// Which new keys get a row. A key that is seen without one is decided on anew in each step, by the
/// step's keys and counts alone. One that is written by upsert gets a row in any case.
struct AdmitConfig {
  /// The rule in postfix notation, 1 to kMostAdmitTerms terms.
  std::vector<AdmitTerm> rule;
  /// Keys without a row whose count is kept, >= 1, divided over the groups of keys that max_rows
  /// has, or else would have by default. In a full group those leave that were seen longest ago,
  /// the lowest by a fixed hash first; keys of the step stay. Those that find no room count from 0
  /// again. Only with kCount or kShowClick. Absent: no limit.
  std::optional<std::int64_t> max_records = std::nullopt;
  /// Of the counters of kCountSketch, which needs it, at least kFewestSketchBytes; a rank has those
  /// of its virtual shards. Each shard has a count-min sketch of its own: four rows of
  /// w = max_bytes / kFewestSketchBytes counters, rounded down, which end at the largest `count` of
  /// the rule. A key counts as the least of its four counters as the step before left them, and
  /// with what the step brings of it. With N occurrences counted in its shard that is at most
  /// e * N / w too much for all but one in e**4 = 55 keys. Occurrences of keys that a step leaves
  /// without a row are counted, and stay counted: a key that got a row, was written, erased or
  /// evicted is known as often as before. Not with kCount or kShowClick, whose records have all
  /// that a sketch has.
  std::optional<std::int64_t> max_bytes = std::nullopt;
  /// What kProbability draws from beside key and step. A table sets its own, by seed and name.
  std::uint64_t salt = 0;
};

/// How often a key without a row was seen; or of a sketch four counters of 16 bits, under a key of
/// their virtual shard that stands for them.
struct AdmitRecord {
  Key key = 0;
  std::int64_t count = 0;   ///< >= 1; of a sketch the counters, that of the first row lowest
  std::int64_t step = 0;    ///< that saw it last, as the index counts
  std::int64_t clicks = 0;  ///< >= 0; of a rule with kShowClick

  friend bool operator==(const AdmitRecord&, const AdmitRecord&) = default;
};

/// What a key without a row reads.
enum class DefaultKind : std::uint8_t {
  kConstant = 0,    ///< one value in each column; no gradient is kept
  kInitialRow = 1,  ///< the row that the key would begin with, which is not kept
  kSharedRows = 2,  ///< one of some rows of the table, which learn from all keys that read them
};

/// How a new row begins, in a table whose keys without a row share rows.
enum class BeginWith : std::uint8_t {
  kInitialRow = 0,  ///< as in other tables
  /// The weights that its shared row then has, and the state of a new row. "Then" is when the key
  /// gets its row; in a batch with a step, when that row is first read, trained or visible.
  kSharedRow = 1,
};

/// What keys without a row read: those that are refused, not admitted, or looked up and not there.
struct DefaultConfig {
  DefaultKind kind = DefaultKind::kConstant;
  float value = 0.0F;  ///< of kConstant, finite
  /// Of kSharedRows, 1 to kNumVirtualShards: each has an equal part of the virtual shards, so which
  /// one a key reads depends on the key alone. Parts differ by a shard unless it is a power of two.
  std::int64_t num_rows = 1;
  BeginWith begin_with = BeginWith::kInitialRow;  ///< of kSharedRows

  friend bool operator==(const DefaultConfig&, const DefaultConfig&) = default;
};

/// Which of so many shared rows, 1 to kNumVirtualShards, a key reads.
RECSDK_API std::int64_t shared_row(Key key, std::int64_t num_rows);
/// The key that stands for a shared row where rows are saved, and that its initial values are made
/// of: it is one of those that read it, so both have one owner.
RECSDK_API Key shared_row_key(std::int64_t row, std::int64_t num_rows);

/// AdmitConfig::salt of a table with this seed and name.
RECSDK_API std::uint64_t admission_salt(std::uint64_t seed, std::string_view name);

/// How many groups an index of so many rows has unless told otherwise. A power of two: as many as
/// leave each at least 4096 rows, but no fewer than 64 where that leaves 16, at most 65,536.
RECSDK_API std::int64_t default_eviction_groups(std::int64_t max_rows);

/// The key's group among `num_groups`, a power of two: ranges of virtual shards.
RECSDK_API std::int64_t eviction_group(Key key, std::int64_t num_groups);

/// How many rows the group has of max_rows. Groups differ by one at most.
RECSDK_API std::int64_t eviction_group_quota(std::int64_t max_rows, std::int64_t num_groups,
                                             std::int64_t group);

}  // namespace recsdk
