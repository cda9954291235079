// What eviction keeps of a key beside it: when it was last seen, how often, its score, its age.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "recsdk/index.h"
#include "recsdk/policy.h"
#include "recsdk/row_file.h"
#include "rows/row_numbers.h"

namespace recsdk::internal {

/// One number of a row's metadata, as a word of 64 bits.
enum class MetaKind : std::uint8_t {
  kStep,       ///< int64: the step that saw the key last
  kTime,       ///< int64: the largest time that came with it
  kCount,      ///< int64: occurrences, decayed, in units of 1 / kCountUnits
  kScore,      ///< a float's bits
  kBorn,       ///< int64: the step in which it came
  kShowClick,  ///< int64: alpha * shows + beta * clicks, decayed, in units of 1 / kCountUnits
  kTotals,     ///< int64: that, not decayed: all its shows and clicks so far
  kNorm,       ///< a float's bits: the norm of its row
  kPlace,      ///< a float's bits: what a function made of the others
  kWorth,      ///< int64: in such units, what it was worth before the latest step that saw it; by
               ///< totals
};

inline constexpr int kMaxMetaWords = 6;
inline constexpr std::int64_t kCountUnits = 1 << 16;
inline constexpr std::int64_t kMostCounted = std::int64_t{1} << 52;  // which a double holds

/// A word as row files have it; of the word its first bytes.
FileField file_field(MetaKind kind);
/// What a field of a row file is; none: no metadata.
std::optional<MetaKind> meta_kind(const FileField& field);

/// A row of which a look has found another number than the look before, which had found this one.
struct Measured {
  std::uint32_t row = 0;
  float before = 0.0F;
};

/// The metadata that a config asks for, and what follows from them. Order numbers compare as
/// unsigned, and do not depend on the time at which they are looked at. They rise whenever a key is
/// seen, but those of kScore and kShowClickTotals, which may fall, those of kShowClick, which may
/// by rounding, and those of kLowNorm and kFunction, which only looks change.
class RowMeta {
 public:
  using Words = std::int64_t*;  // of a row

  explicit RowMeta(const EvictConfig& config);

  /// True if keys leave at looks: that were not seen for long, a part of all, or of low norm.
  bool expires() const noexcept { return ttl_ || rare_ttl_ || share_ || below_; }
  /// The part of keys that leaves at each look.
  std::optional<double> share() const noexcept { return share_; }
  /// Whether a look at all keys is due, when this step begins after that one.
  bool is_due(std::int64_t before, std::int64_t step) const noexcept {
    return (expires() || is_measured()) && period(step) != period(before);
  }
  /// From this step to the next at which a look is due.
  std::int64_t steps_to_look(std::int64_t step) const noexcept {
    const std::int64_t rest = step % expire_every_;
    return rest < 0 ? -rest : expire_every_ - rest;
  }
  /// True if the key has expired as of a step, by time as of `now`. One of unknown time has not.
  bool has_expired(const std::int64_t* words, std::int64_t step, std::int64_t now) const noexcept;
  /// The largest time that came with the key; by time.
  std::int64_t time(const std::int64_t* words) const noexcept { return words[time_]; }

  int num_words() const noexcept { return num_words_; }
  std::span<const MetaKind> kinds() const noexcept {
    return {kinds_.data(), static_cast<std::size_t>(num_words_)};
  }

  bool is_by_score() const noexcept { return score_ >= 0; }
  bool is_by_norm() const noexcept { return order_ == EvictOrder::kLowNorm; }
  /// Whether looks find out where rows stand.
  bool is_measured() const noexcept { return measured_ >= 0; }
  /// What the latest look has found of a row.
  float measured(const std::int64_t* words) const noexcept { return float_of(words[measured_]); }
  /// Sets that; false if it was the same. What is not a number has no place among others; such a
  /// row is of no use. Nor has minus zero.
  bool set_measured(Words words, float found) const noexcept {
    const std::int64_t word = word_of(std::isnan(found) ? 0.0F : found + 0.0F);
    return std::exchange(words[measured_], word) != word;
  }
  /// As `words` were before: `to` (num_words,).
  void copy_before(const std::int64_t* words, float measured, Words to) const noexcept;
  /// Where rows stand of which a look has found this.
  static std::uint64_t measured_order(float found) noexcept;
  /// What a function is shown of a key; what is not kept is 0.
  struct Shown {
    std::int64_t step = 0;
    std::int64_t time = 0;
    std::int64_t count = 0;
    float score = 0.0F;
  };
  Shown shown(const std::int64_t* words) const noexcept {
    return {.step = words[kStepWord],
            .time = time_ >= 0 ? words[time_] : 0,
            .count = count_ >= 0 ? words[count_] / kCountUnits : 0,
            .score = score_ >= 0 ? float_of(words[score_]) : 0.0F};
  }
  bool keeps_counts() const noexcept { return count_ >= 0; }
  bool is_by_time() const noexcept { return time_ >= 0; }
  bool is_by_show_click() const noexcept { return show_click_ >= 0; }
  bool needs_clicks() const noexcept { return click_units_ > 0; }
  /// Whether at looks the smaller key leaves first of those that stand alike, and not by a hash.
  bool is_by_totals() const noexcept { return worth_ >= 0; }
  /// Whether an order may fall, though a key was seen; only by shows and clicks.
  bool may_fall() const noexcept { return rate_ > 0.0 || worth_ >= 0; }

  /// What an occurrence of a key brings.
  struct Occurrence {
    std::int64_t time = 0;
    const float* score = nullptr;
    std::int64_t count = 1;
    std::int64_t clicks = 0;
  };
  static Occurrence occurrence(const KeyData& data, std::size_t i) noexcept {
    const auto number = [i](std::span<const std::int64_t> of, std::int64_t otherwise) {
      return of.empty() ? otherwise : of[of.size() == 1 ? 0 : i];
    };
    return {.time = number(data.times, 0),
            .score = data.scores.empty() ? nullptr : &data.scores[i],
            .count = number(data.counts, 1),
            .clicks = number(data.clicks, 0)};
  }

  std::int64_t step(const std::int64_t* words) const noexcept { return words[kStepWord]; }
  /// That, or the step in which the key came if it is later.
  std::int64_t latest_step(const std::int64_t* words) const noexcept {
    return born_ < 0 ? step(words) : std::max(step(words), born(words));
  }

  /// A key that comes in this step, not counting any occurrence.
  void begin(Words words, std::int64_t step, bool has_scores) const noexcept;
  /// A key of which nothing is known: never seen, and older than all others.
  void begin_unknown(Words words) const noexcept;
  /// What an occurrence changes. The result depends on the occurrences of a step, not their order.
  void touch(Words words, std::int64_t step, const Occurrence& seen) const noexcept {
    const bool is_first = words[kStepWord] != step;
    if (is_first) advance(words, step);
    if (time_ >= 0 && words[time_] < seen.time) words[time_] = seen.time;
    if (count_ >= 0) count(words);
    if (show_click_ >= 0) weigh(words, seen.count, seen.clicks);
    if (seen.score != nullptr) give_score(words, *seen.score, is_first);
  }

  /// As `touch`, by shows and clicks; false if the order has fallen. Orders are worked out only
  /// where what is added is so little that rounding could outdo it.
  bool touch_shown(Words words, std::int64_t step, const Occurrence& seen) const noexcept {
    if (worth_ >= 0) {
      const std::int64_t before = worth(words);
      touch(words, step, seen);
      return worth(words) >= before;
    }
    const std::int64_t step_before = words[kStepWord];
    const std::int64_t units_before = words[show_click_];
    if (step_before != step) advance(words, step);
    if (count_ >= 0) count(words);
    const std::int64_t kept = words[show_click_];
    weigh(words, seen.count, seen.clicks);
    const std::int64_t units = words[show_click_];
    // What decays is rounded down by less than one unit, so more than one makes up for it.
    const bool has_risen = units - kept > 1 + (units >> kSurelyMore) && step_before <= step &&
                           elapsed(step_before, step) <= kFewSteps && step >= -most_step_ &&
                           step <= most_step_;
    return has_risen || decayed_order(units, step) >= decayed_order(units_before, step_before);
  }

  /// Calls body(touch), where touch(i, words) changes what occurrence i of a call in this step
  /// changes, scores apart.
  template <typename Body>
  void with_touch(const KeyData& data, std::int64_t step, const Body& body) const noexcept {
    if (counts_beside_ || show_click_ >= 0 || order_ == EvictOrder::kFunction) {
      body([=, this](std::size_t i, Words words) { touch(words, step, occurrence(data, i)); });
    } else if (time_ >= 0) {
      const std::int64_t* const times = data.times.data();
      const std::size_t stride = data.times.size() == 1 ? 0 : 1;
      body([=](std::size_t i, Words words) {
        words[kStepWord] = step;
        words[kSecondWord] = std::max(words[kSecondWord], times[i * stride]);
      });
    } else if (count_ < 0) {
      body([=](std::size_t /*i*/, Words words) { words[kStepWord] = step; });
    } else if (half_life_ == 0.0) {
      body([step](std::size_t /*i*/, Words words) {
        words[kStepWord] = step;
        words[kSecondWord] = counted(words[kSecondWord]);
      });
    } else {
      const double* const factors = factors_.data();
      body([this, step, factors](std::size_t /*i*/, Words words) {
        // Nothing decays from a step to itself: no branch on whether this one has seen the key.
        const std::uint64_t steps =
            static_cast<std::uint64_t>(step) - static_cast<std::uint64_t>(words[kStepWord]);
        words[kSecondWord] = counted(
            steps < kNumFactors ? times(words[kSecondWord], factors[steps])
                                : decayed(words[kSecondWord], elapsed(words[kStepWord], step)));
        words[kStepWord] = step;
      });
    }
  }

  /// Where the row stands.
  std::uint64_t order(const std::int64_t* words) const noexcept;
  /// With min_age: keys stay for a while.
  bool has_young() const noexcept { return born_ >= 0; }
  std::int64_t born(const std::int64_t* words) const noexcept { return words[born_]; }
  bool is_grown(std::int64_t born, std::int64_t step) const noexcept {
    return elapsed(born, step) >= min_age_;
  }
  /// True if the key may leave in this step.
  bool may_leave(const std::int64_t* words, std::int64_t step) const noexcept {
    return words[kStepWord] != step && (born_ < 0 || is_grown(words[born_], step));
  }

 private:
  static constexpr std::int64_t kNeverSeen = -2;  // the worth of a key that no step has seen
  static constexpr int kStepWord = 0;
  static constexpr int kSecondWord = 1;  // time, count or score
  static constexpr std::size_t kNumFactors = 256;
  static constexpr int kSurelyMore = 20;  // a part of 2**-20 is far more than orders are rounded by
  static constexpr std::int64_t kFewSteps = 1 << 20;

  // A float as a word, and back.
  static std::int64_t word_of(float number) noexcept {
    return static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(number));
  }
  static float float_of(std::int64_t word) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(word));
  }
  // Steps may be any numbers.
  static std::int64_t elapsed(std::int64_t from, std::int64_t to) noexcept {
    std::int64_t steps = 0;
    if (to <= from) return 0;
    return __builtin_sub_overflow(to, from, &steps) ? INT64_MAX : steps;
  }
  std::int64_t period(std::int64_t step) const noexcept {
    return step / expire_every_ - static_cast<std::int64_t>(step % expire_every_ < 0);
  }
  void add(MetaKind kind, int& place) noexcept;
  void weigh_by(const EvictConfig& config) noexcept;
  void advance(Words words, std::int64_t step) const noexcept {
    if (decayed_ >= 0) words[decayed_] = decayed(words[decayed_], elapsed(words[kStepWord], step));
    if (worth_ >= 0 && words[worth_] != kNeverSeen) words[worth_] = worth(words);
    words[kStepWord] = step;
  }
  static std::int64_t counted(std::int64_t units) noexcept {
    return units + (units < kMostCounted ? kCountUnits : 0);
  }
  void count(Words words) const noexcept { words[count_] = counted(words[count_]); }
  static std::int64_t times(std::int64_t units, double factor) noexcept {
    return static_cast<std::int64_t>(static_cast<double>(units) * factor);
  }
  void weigh(Words words, std::int64_t count, std::int64_t clicks) const noexcept;
  // Of kShowClickTotals: only the first step that sees a key does not decay.
  std::int64_t worth(const std::int64_t* words) const noexcept;
  std::int64_t decayed(std::int64_t units, std::int64_t elapsed) const noexcept;
  void give_score(Words words, float score, bool is_first) const noexcept;
  double factor(std::int64_t elapsed) const noexcept;
  std::uint64_t decayed_order(std::int64_t units, std::int64_t step) const noexcept;

  EvictOrder order_;
  double half_life_ = 0.0;      // 0: none
  double decay_ = 1.0;          // what a step leaves, of shows and clicks
  double rate_ = 0.0;           // log2 of it, negated
  std::int64_t most_step_ = 0;  // by which orders rise so little that they are rounded by 2**-30
  std::int64_t show_units_ = 0;
  std::int64_t click_units_ = 0;
  std::int64_t min_age_;
  int num_words_ = 0;
  std::optional<std::int64_t> ttl_;
  std::optional<std::int64_t> rare_ttl_;
  std::int64_t rare_units_ = 0;  // of counts
  std::int64_t expire_every_ = 1;
  std::optional<double> share_;
  std::optional<double> below_;
  bool counts_beside_ = false;  // what is rare follows from counts, and the order from others
  int time_ = -1;               // words of each kind, -1 if there is none
  int count_ = -1;
  int score_ = -1;
  int born_ = -1;
  int show_click_ = -1;  // kShowClick or kTotals
  int worth_ = -1;
  int measured_ = -1;
  int decayed_ = -1;
  std::array<MetaKind, kMaxMetaWords> kinds_{};
  std::array<double, kNumFactors> factors_{};  // of small elapsed times
};

/// Throws std::invalid_argument naming the field that is wrong; `title` begins the message.
void check_eviction(const EvictConfig& config, const std::string& title);

}  // namespace recsdk::internal
