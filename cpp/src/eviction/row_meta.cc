#include "eviction/row_meta.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels/scalar_math.h"
#include "util/must.h"

namespace recsdk::internal {
namespace {

constexpr double kLog2 = 0.6931471805599453;
constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
constexpr std::int64_t kNoWorth = -1;  // of a key that one step has seen
constexpr double kMostWorth = 0x1p62;

std::uint64_t sortable(std::int64_t value) { return static_cast<std::uint64_t>(value) ^ kSign; }

std::uint64_t sortable(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// log2 of a number above 0. Not the C library's, which differs between processors.
double log2_of(double value) {
  int exponent = 0;
  const double rest = 2.0 * std::frexp(value, &exponent);  // in [1, 2)
  const int doublings = exponent - 1;
  const double scaled = rest < 1.4 ? rest : rest / 2.0;
  const double whole = rest < 1.4 ? doublings : doublings + 1;
  return whole + log_of_ratio((scaled - 1.0) / (scaled + 1.0)) / kLog2;
}

std::int64_t units_of(double value) {
  return static_cast<std::int64_t>(std::nearbyint(value * static_cast<double>(kCountUnits)));
}

std::int64_t product(std::int64_t count, std::int64_t units) {
  std::int64_t found = 0;
  return __builtin_mul_overflow(count, units, &found) ? kMostCounted : found;
}

bool is_by_shows(const EvictConfig& config) {
  return config.order == EvictOrder::kShowClick || config.order == EvictOrder::kShowClickTotals;
}

void check_show_click(const EvictConfig& config, const auto& fail) {
  constexpr double kLeast = 0x1p-16;
  constexpr double kMost = 0x1p20;
  const auto is_weight = [](double x) { return x == 0.0 || (x >= kLeast && x <= kMost); };
  if (!is_by_shows(config)) {
    if (config.alpha != 1.0 || config.beta != 0.0 || config.decay != 1.0)
      fail("alpha, beta or decay is given, and only kShowClick goes by them; leave them out");
    return;
  }
  for (const auto& [name, x] : {std::pair("alpha", config.alpha), std::pair("beta", config.beta)}) {
    if (!is_weight(x)) fail(must(name, "be 0, or 2**-16 to 2**20", x));
  }
  if (config.alpha == 0.0 && config.beta == 0.0)
    fail("alpha or beta must be above 0, got 0 for both: all keys would be alike");
  if (!(config.decay > 0.0 && config.decay <= 1.0))
    fail(must("decay", "be above 0, up to 1", config.decay));
}

void check_order(const EvictConfig& config, const auto& fail) {
  if (config.order > EvictOrder::kShowClickTotals)
    fail(must("order", "be one of EvictOrder", config.order));
  if (config.clock > EvictClock::kTime) fail(must("clock", "be one of EvictClock", config.clock));
  const bool is_function = config.order == EvictOrder::kFunction;
  if (config.clock == EvictClock::kTime && config.order != EvictOrder::kLru && !is_function)
    fail("clock is time, and only kLru and kFunction go by it; leave it out");
  if (is_function != static_cast<bool>(config.function))
    fail("function belongs together with kFunction; pass both or none");
  if (!is_function && (config.keeps_counts || config.keeps_scores || config.ignores_now))
    fail(
        "keeps_counts, keeps_scores or ignores_now is given, and only kFunction has columns; leave "
        "it out");
  if (config.half_life && config.order != EvictOrder::kLfu)
    fail("half_life is given, and only kLfu decays; leave it out");
  if (config.half_life && !(*config.half_life > 0.0 && std::isfinite(*config.half_life)))
    fail(must("half_life", "be finite and above 0", *config.half_life));
  if (config.below && config.order != EvictOrder::kLowNorm)
    fail("below is given, and only kLowNorm goes by norms; leave it out");
  if (config.below && !(*config.below > 0.0 && std::isfinite(*config.below)))
    fail(must("below", "be finite and above 0", *config.below));
}

void check_expiry(const EvictConfig& config, const auto& fail) {
  const auto require = [&](const char* name, std::optional<std::int64_t> value,
                           std::int64_t least) {
    if (value && *value < least)
      fail(must(name, "be " + std::to_string(least) + " or more", *value));
  };
  require("ttl", config.ttl, 1);
  require("rare_ttl", config.rare_ttl, 1);
  require("rare_count", config.rare_count, 2);
  require("expire_every", config.expire_every, 1);
  if (config.rare_count && *config.rare_count > kMostCounted / kCountUnits)
    fail(must("rare_count", "be at most 2**36", *config.rare_count));
  if (config.share && !(*config.share > 0.0 && *config.share <= 1.0))
    fail(must("share", "be above 0, up to 1", *config.share));
  if (config.rare_ttl.has_value() != config.rare_count.has_value())
    fail("rare_ttl and rare_count belong together; pass both or none");
  if (config.ttl && config.rare_ttl && *config.rare_ttl >= *config.ttl)
    fail(must("rare_ttl", "be less than ttl, " + std::to_string(*config.ttl), *config.rare_ttl));
}

}  // namespace

FileField file_field(MetaKind kind) {
  switch (kind) {
    case MetaKind::kStep:
      return {"evict_step", FieldType::kInt64, 1};
    case MetaKind::kTime:
      return {"evict_time", FieldType::kInt64, 1};
    case MetaKind::kCount:
      return {"evict_count", FieldType::kInt64, 1};
    case MetaKind::kScore:
      return {"evict_score", FieldType::kFloat32, 1};
    case MetaKind::kBorn:
      return {"evict_born", FieldType::kInt64, 1};
    case MetaKind::kShowClick:
      return {"evict_show_click", FieldType::kInt64, 1};
    case MetaKind::kTotals:
      return {"evict_totals", FieldType::kInt64, 1};
    case MetaKind::kNorm:
      return {"evict_norm", FieldType::kFloat32, 1};
    case MetaKind::kPlace:
      return {"evict_place", FieldType::kFloat32, 1};
    case MetaKind::kWorth:
      return {"evict_worth", FieldType::kInt64, 1};
  }
  throw std::invalid_argument("unknown kind of metadata");
}

std::optional<MetaKind> meta_kind(const FileField& field) {
  for (const MetaKind kind : {MetaKind::kStep, MetaKind::kTime, MetaKind::kCount, MetaKind::kScore,
                              MetaKind::kBorn, MetaKind::kShowClick, MetaKind::kTotals,
                              MetaKind::kNorm, MetaKind::kPlace, MetaKind::kWorth}) {
    if (file_field(kind) == field) return kind;
  }
  return std::nullopt;
}

RowMeta::RowMeta(const EvictConfig& config)
    : order_(config.order),
      half_life_(config.half_life.value_or(0.0)),
      min_age_(config.min_age),
      ttl_(config.ttl),
      rare_ttl_(config.rare_ttl),
      rare_units_(config.rare_count.value_or(0) * kCountUnits),
      expire_every_(config.expire_every),
      share_(config.share),
      below_(config.below),
      counts_beside_(config.rare_count && order_ != EvictOrder::kLfu) {
  int step = -1;
  add(MetaKind::kStep, step);
  if (config.clock == EvictClock::kTime) add(MetaKind::kTime, time_);
  if (order_ == EvictOrder::kLfu || counts_beside_ || config.keeps_counts)
    add(MetaKind::kCount, count_);
  if (order_ == EvictOrder::kScore || config.keeps_scores) add(MetaKind::kScore, score_);
  if (is_by_shows(config)) weigh_by(config);
  if (order_ == EvictOrder::kLowNorm) add(MetaKind::kNorm, measured_);
  if (order_ == EvictOrder::kFunction) add(MetaKind::kPlace, measured_);
  if (min_age_ > 0) add(MetaKind::kBorn, born_);
  if (half_life_ == 0.0) return;
  decayed_ = count_;
  for (std::size_t i = 0; i < factors_.size(); ++i)
    factors_[i] = exp_of_negative(-kLog2 * (static_cast<double>(i) / half_life_));
}

void RowMeta::weigh_by(const EvictConfig& config) noexcept {
  const bool is_by_totals = order_ == EvictOrder::kShowClickTotals;
  // Kinds of their own: one says nothing to a table that goes by the other.
  add(is_by_totals ? MetaKind::kTotals : MetaKind::kShowClick, show_click_);
  show_units_ = units_of(config.alpha);
  click_units_ = units_of(config.beta);
  decay_ = config.decay;
  if (is_by_totals) return add(MetaKind::kWorth, worth_);
  if (decay_ == 1.0) return;
  decayed_ = show_click_;
  rate_ = -log2_of(decay_);
  most_step_ = static_cast<std::int64_t>(std::min(0x1p20 / rate_, 0x1p40));
  for (std::size_t i = 0; i < factors_.size(); ++i) factors_[i] = power(decay_, i);
}

void RowMeta::add(MetaKind kind, int& place) noexcept {
  kinds_[static_cast<std::size_t>(num_words_)] = kind;
  place = num_words_++;
}

double RowMeta::factor(std::int64_t elapsed) const noexcept {
  if (elapsed < static_cast<std::int64_t>(kNumFactors))
    return factors_[static_cast<std::size_t>(elapsed)];
  if (half_life_ == 0.0) return power(decay_, static_cast<std::uint64_t>(elapsed));
  return exp_of_negative(-kLog2 * (static_cast<double>(elapsed) / half_life_));
}

std::int64_t RowMeta::decayed(std::int64_t units, std::int64_t elapsed) const noexcept {
  return times(units, factor(elapsed));
}

void RowMeta::weigh(Words words, std::int64_t count, std::int64_t clicks) const noexcept {
  if (worth_ >= 0 && words[worth_] == kNeverSeen) words[worth_] = kNoWorth;
  for (const std::int64_t more : {product(count, show_units_), product(clicks, click_units_)})
    words[show_click_] += std::min(more, kMostCounted - std::min(words[show_click_], kMostCounted));
}

std::int64_t RowMeta::worth(const std::int64_t* words) const noexcept {
  if (words[worth_] < 0) return words[show_click_];
  const double sum = static_cast<double>(words[worth_]) + static_cast<double>(words[show_click_]);
  return static_cast<std::int64_t>(std::min(sum * decay_, kMostWorth));
}

void RowMeta::begin(Words words, std::int64_t step, bool has_scores) const noexcept {
  words[kStepWord] = step;
  if (time_ >= 0) words[time_] = kNoTime;
  if (count_ >= 0) words[count_] = 0;
  if (show_click_ >= 0) words[show_click_] = 0;
  if (worth_ >= 0) words[worth_] = kNoWorth;
  if (score_ >= 0)
    words[score_] = word_of(has_scores ? -std::numeric_limits<float>::infinity() : 0.0F);
  if (measured_ >= 0) words[measured_] = word_of(std::numeric_limits<float>::infinity());
  if (born_ >= 0) words[born_] = step;
}

void RowMeta::copy_before(const std::int64_t* words, float measured, Words to) const noexcept {
  std::copy_n(words, num_words_, to);
  to[measured_] = word_of(measured);
}

std::uint64_t RowMeta::measured_order(float found) noexcept {
  return sortable(static_cast<double>(found));
}

void RowMeta::begin_unknown(Words words) const noexcept {
  // What expires must not leave for having been saved without metadata: it begins now.
  begin(words, expires() ? 0 : std::numeric_limits<std::int64_t>::min(), false);
  if (worth_ >= 0) words[worth_] = kNeverSeen;
}

bool RowMeta::has_expired(const std::int64_t* words, std::int64_t step,
                          std::int64_t now) const noexcept {
  if (below_ && static_cast<double>(float_of(words[measured_])) < *below_) return true;
  if (time_ >= 0 && words[time_] == kNoTime) return false;
  const std::int64_t idle =
      time_ >= 0 ? elapsed(words[time_], now) : elapsed(words[kStepWord], step);
  if (ttl_ && idle >= *ttl_) return true;
  if (!rare_ttl_ || idle < *rare_ttl_) return false;
  const std::int64_t units = words[count_];
  if (half_life_ == 0.0 || words[kStepWord] >= step) return units < rare_units_;
  return decayed(units, elapsed(words[kStepWord], step)) < rare_units_;
}

// Minus zero would be another number to the order.
void RowMeta::give_score(Words words, float score, bool is_first) const noexcept {
  const float given = score + 0.0F;
  words[score_] = word_of(is_first ? given : std::max(given, float_of(words[score_])));
}

std::uint64_t RowMeta::order(const std::int64_t* words) const noexcept {
  if (order_ == EvictOrder::kScore) return sortable(static_cast<double>(float_of(words[score_])));
  if (measured_ >= 0) return measured_order(measured(words));
  if (order_ == EvictOrder::kLru) return sortable(words[time_ >= 0 ? time_ : kStepWord]);
  if (worth_ >= 0) return sortable(worth(words));
  const std::int64_t units = words[show_click_ >= 0 ? show_click_ : count_];
  return decayed_ < 0 ? sortable(units) : decayed_order(units, words[kStepWord]);
}

std::uint64_t RowMeta::decayed_order(std::int64_t units, std::int64_t step) const noexcept {
  const double rise =
      half_life_ > 0.0 ? static_cast<double>(step) / half_life_ : static_cast<double>(step) * rate_;
  return sortable(log2_of(static_cast<double>(std::max<std::int64_t>(units, 1))) + rise);
}

void check_eviction(const EvictConfig& config, const std::string& title) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": eviction." + what);
  };
  check_order(config, fail);
  check_show_click(config, fail);
  if (config.min_age < 0) fail(must("min_age", "be 0 or more", config.min_age));
  check_expiry(config, fail);
}

}  // namespace recsdk::internal
