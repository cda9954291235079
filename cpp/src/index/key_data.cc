// What may come with the keys of a call: times, scores, counts, clicks, and the time.
#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>

#include "index/index_impl.h"
#include "util/must.h"

namespace recsdk {
namespace {

void check_numbers(const std::string& title, const char* name,
                   std::span<const std::int64_t> numbers, std::size_t num_keys,
                   std::int64_t least) {
  if (numbers.size() > 1 && numbers.size() != num_keys)
    throw std::invalid_argument(title + ": " +
                                internal::must_fit_keys(name, num_keys, numbers.size()) +
                                "; or pass one for all");
  const auto lowest = std::min_element(numbers.begin(), numbers.end());
  if (lowest != numbers.end() && *lowest < least)
    throw std::invalid_argument(
        title + ": " + internal::must(name, "be " + std::to_string(least) + " or more", *lowest));
}

}  // namespace

bool Index::Impl::is_by_show_click() const noexcept {
  return evictor && evictor->meta().is_by_show_click();
}

void Index::Impl::check_data(std::size_t num_keys, const KeyData& data, bool insert,
                             bool admits_all) const {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(title + ": " + what);
  };
  const bool is_by_time = evictor && evictor->meta().is_by_time();
  const bool is_by_score = evictor && evictor->meta().is_by_score();
  if (!data.times.empty() && !(insert && is_by_time))
    fail("times are given, and only calls that insert, with eviction by time, take them");
  if (data.now && !(insert && is_by_time))
    fail("now is given, and only calls that insert, with eviction by time, take it");
  check_time("now", data.now);
  if (!data.scores.empty() && !(insert && is_by_score))
    fail("scores are given, and only calls that insert, with eviction by score, take them");
  if (data.times.size() > 1 && data.times.size() != num_keys)
    fail(internal::must_fit_keys("times", num_keys, data.times.size()) + "; or pass one for all");
  if (!data.scores.empty() && data.scores.size() != num_keys)
    fail(internal::must_fit_keys("scores", num_keys, data.scores.size()));
  check_counts(num_keys, data, insert);
  check_clicks(num_keys, data, insert, admits_all);
  const auto odd = std::find_if_not(data.scores.begin(), data.scores.end(),
                                    [](float score) { return std::isfinite(score); });
  if (odd != data.scores.end()) fail(internal::must("scores", "be finite", *odd));
}

// A key's time may be unknown, the time is not.
void Index::Impl::check_time(const char* name, std::optional<std::int64_t> time) const {
  if (time != kNoTime) return;
  throw std::invalid_argument(
      title + ": " + internal::must(name, "be above -2**63, which stands for none", *time));
}

void Index::Impl::check_counts(std::size_t num_keys, const KeyData& data, bool insert) const {
  if (data.counts.empty()) return;
  if (!insert || !(admission || is_by_show_click()))
    throw std::invalid_argument(title +
                                ": counts are given, and only calls that insert, with admission or "
                                "eviction by shows and clicks, take them");
  check_numbers(title, "counts", data.counts, num_keys, 1);
}

void Index::Impl::check_clicks(std::size_t num_keys, const KeyData& data, bool insert,
                               bool admits_all) const {
  if (data.clicks.empty()) {
    const bool needs =
        (evictor && evictor->meta().needs_clicks()) || (admission && admission->needs_clicks());
    if (!insert || admits_all || !needs || num_keys == 0) return;
    throw std::invalid_argument(title +
                                ": a rule goes by clicks, its beta is above 0, and the call brings "
                                "none; pass clicks, or 0 for all");
  }
  const bool admission_takes = admission && admission->takes_clicks() && !admits_all;
  if (!insert || !(admission_takes || is_by_show_click()))
    throw std::invalid_argument(title +
                                ": clicks are given, and only calls that insert, with a rule of "
                                "shows and clicks, take them");
  check_numbers(title, "clicks", data.clicks, num_keys, 0);
}

void Index::Impl::check_admits_all(const MapOptions& options) const {
  if (!options.admits_all) return;
  if (!options.insert)
    throw std::invalid_argument(title + ": admits_all is of calls that insert; leave it out");
  // What it forgets could not be given back to readers.
  if (options.lease != nullptr && options.lease->step())
    throw std::invalid_argument(title +
                                ": a call of a batch with a step cannot admit all keys; pass a "
                                "lease without a step, or none");
}

}  // namespace recsdk
