// Which rules of admission make sense, and which counts fit one.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "admission/admission.h"
#include "util/must.h"

namespace recsdk::internal {

using Kind = AdmitTerm::Kind;

namespace {

void check_show_click(const AdmitTerm& term, const auto& fail) {
  for (const auto& [name, value] : {std::pair("alpha", term.alpha), std::pair("beta", term.beta)}) {
    if (!(value >= 0.0 && std::isfinite(value))) fail(must(name, "be finite and 0 or more", value));
  }
  if (term.alpha == 0.0 && term.beta == 0.0)
    fail("alpha or beta must be above 0, got 0 for both: no key would ever be admitted");
  if (!(term.threshold > 0.0 && std::isfinite(term.threshold)))
    fail(must("threshold", "be finite and above 0", term.threshold));
}

void check_limits(const AdmitConfig& config, std::optional<std::int64_t> groups, const auto& fail) {
  const auto has = [&](Kind kind) {
    return std::any_of(config.rule.begin(), config.rule.end(),
                       [kind](const AdmitTerm& term) { return term.kind == kind; });
  };
  const bool has_records = has(Kind::kCount) || has(Kind::kShowClick);
  if (has(Kind::kCountSketch) && has_records)
    fail(
        "rule has a sketch beside counts that are kept in records, which have all that it has; "
        "take kCount in place of kCountSketch");
  if (has(Kind::kCountSketch) != config.max_bytes.has_value())
    fail(config.max_bytes ? "max_bytes is given, and the rule has no sketch; leave it out"
                          : "max_bytes is missing, and the rule has a sketch; pass it");
  if (config.max_bytes && *config.max_bytes < kFewestSketchBytes)
    fail(must("max_bytes", "be " + std::to_string(kFewestSketchBytes) + " or more",
              *config.max_bytes));
  if (!config.max_records) return;
  if (!has_records) fail("max_records is given, and the rule counts nothing; leave it out");
  if (*config.max_records < 1) fail(must("max_records", "be 1 or more", *config.max_records));
  if (groups && *config.max_records < *groups)
    fail(must("max_records", "be at least the number of groups of keys, " + std::to_string(*groups),
              *config.max_records) +
         "; pass as many, or have fewer groups");
}

std::int64_t most_of(const AdmitTerm& term) {
  return term.kind == Kind::kCountSketch ? kMostSketchCount : kMostAdmitCount;
}

}  // namespace

void check_admission(const AdmitConfig& config, const std::string& title,
                     std::optional<std::int64_t> groups) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": admission." + what);
  };
  if (config.rule.empty() || config.rule.size() > kMostAdmitTerms)
    fail(must("rule", "have 1 to " + std::to_string(kMostAdmitTerms) + " terms",
              config.rule.size()));
  std::size_t depth = 0;
  for (const AdmitTerm& term : config.rule) {
    const bool joins = term.kind == Kind::kAll || term.kind == Kind::kAny;
    if (term.kind > Kind::kShowClickOfStep)
      fail(must("kind", "be one of AdmitTerm::Kind", term.kind));
    if (joins && depth < 2) fail("rule joins terms before there are two; pass it in postfix order");
    depth += joins ? std::size_t(-1) : 1;
    const bool counts = term.kind == Kind::kCount || term.kind == Kind::kCountSketch;
    if (counts && (term.count < 1 || term.count > most_of(term)))
      fail(must("count", "be 1 to " + std::to_string(most_of(term)), term.count));
    if (term.kind == Kind::kProbability && !(term.probability > 0.0 && term.probability <= 1.0))
      fail(must("probability", "be above 0, up to 1", term.probability));
    if (term.kind == Kind::kShowClick || term.kind == Kind::kShowClickOfStep)
      check_show_click(term, fail);
  }
  if (depth != 1) fail("rule has terms that are not joined; join them by kAll or kAny");
  check_limits(config, groups, fail);
}

void Admission::check(std::span<const AdmitRecord> records, const std::string& title) const {
  for (const AdmitRecord& record : records) {
    if (record.count < 1 || record.clicks < 0)
      throw std::invalid_argument(title + ": key " + std::to_string(record.key) +
                                  " without a row was seen " + std::to_string(record.count) +
                                  " times, and clicked " + std::to_string(record.clicks) +
                                  "; pass counts of 1 or more, and clicks of 0 or more");
    if (sketch_ ? !sketch_->has_place_for(record) : record.count > kMostAdmitCount)
      throw std::invalid_argument(
          title + ": the count of key " + std::to_string(record.key) + " is " +
          (sketch_ ? "none of a sketch of its max_bytes" : "one of a sketch, and it has none") +
          "; load counts into a table with the rule that counted them");
  }
  std::vector<Key> keys(records.size());
  std::transform(records.begin(), records.end(), keys.begin(),
                 [](const AdmitRecord& record) { return record.key; });
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice == keys.end()) return;
  throw std::invalid_argument(title + ": the count of key " + std::to_string(*twice) +
                              " comes twice; pass distinct keys");
}

}  // namespace recsdk::internal
