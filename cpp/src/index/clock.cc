// Which step each call is of an index with eviction or admission, and what a step may begin with.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>

#include "index/index_impl.h"

namespace recsdk {

using internal::EvictionClock;
using internal::Insertion;
using internal::kWordRows;
using internal::LeaseRecord;

namespace {

// As many steps later as `to` is than `from`; ends at the last step, for steps may be any numbers.
std::int64_t later(std::int64_t step, std::int64_t from, std::int64_t to) {
  __extension__ using Wide = __int128;
  return static_cast<std::int64_t>(std::clamp<Wide>(Wide{step} + to - from, INT64_MIN, INT64_MAX));
}

}  // namespace

// A call without a step is a step of its own, after the latest.
std::int64_t Index::Impl::step_of(std::optional<std::int64_t> lease_step) const {
  const std::int64_t next = later(clock.step, 0, 1);
  if (!lease_step) return next;
  if (!clock.lease_step) return clock.is_begun || had_leases ? next : *lease_step;
  return later(clock.step, *clock.lease_step, *lease_step);
}

void Index::Impl::begin_insertion(std::size_t num_keys, Insertion& insertion,
                                  const LeaseRecord* record, const KeyData& data) const {
  if (!has_clock()) return;
  if (record != nullptr && record->step && clock.lease_step && *record->step < *clock.lease_step) {
    // It might evict what a later batch has inserted and is to make visible.
    throw std::invalid_argument(
        title + ": a batch of step " + std::to_string(*record->step) +
        " is mapped after one of step " + std::to_string(*clock.lease_step) +
        "; with eviction or admission, map batches in ascending order of steps");
  }
  insertion.data = data;
  insertion.time = time_after(num_keys, data);
  const std::optional<std::int64_t> lease_step = record == nullptr ? std::nullopt : record->step;
  insertion.step = step_of(lease_step);
  if (evictor && evictor->meta().is_by_norm() && is_look_due(insertion.step))
    require_trained(lease_step);
  if (!evictor || !evictor->meta().is_by_time() || !data.times.empty()) return;
  if (!insertion.time) {
    if (num_keys == 0) return;
    throw std::invalid_argument(title +
                                ": eviction goes by time, and the call brings none; pass times or "
                                "now, or set a time before");
  }
  insertion.data.times = {&*insertion.time, 1};
}

// Later times of keys move it on.
std::optional<std::int64_t> Index::Impl::time_after(std::size_t num_keys,
                                                    const KeyData& data) const {
  if (data.now) return data.now;
  if (num_keys == 0 || data.times.empty()) return clock.time;
  const std::int64_t latest = *std::max_element(data.times.begin(), data.times.end());
  if (latest == kNoTime) return clock.time;
  return std::max(latest, clock.time.value_or(latest));
}

// Norms depend on what all batches before have trained. Those of the same step stand beside.
void Index::Impl::require_trained(std::optional<std::int64_t> lease_step) const {
  for (const auto& open : open_steps) {
    if (open->has_ended || (lease_step && open->step == lease_step)) continue;
    throw Error(ErrorCode::kBusy,
                title + ": a step begins with a look at the norms of rows, and the batch of step " +
                    std::to_string(*open->step) +
                    " is still in flight; train or drop it, and release its lease, before the "
                    "next batch is mapped");
  }
}

void Index::Impl::advance_clock(const Insertion& insertion, LeaseRecord* record) noexcept {
  if (record != nullptr && !record->clock_before) record->clock_before = clock;
  clock = {.step = insertion.step,
           .lease_step = record == nullptr ? std::nullopt : record->step,
           .is_begun = true,
           .time = insertion.time,
           .num_calls = clock.num_calls + 1};
}

EvictionState Index::Impl::visible_state() const noexcept {
  EvictionClock visible = clock;
  for (const auto& record : open_steps) {
    if (record->clock_before && record->clock_before->num_calls < visible.num_calls)
      visible = *record->clock_before;
  }
  return {visible.step, visible.lease_step, visible.is_begun, visible.time,
          had_leases || (visible.is_begun && last_step)};
}

template <typename Body>
void Index::Impl::for_each_meta(const Body& body) const noexcept {
  for (std::int64_t i = 0; i * kWordRows < numbers.end(); ++i) {
    for (std::uint64_t bits = numbers.used_word(i); bits != 0; bits &= bits - 1)
      body(numbers.meta(i * kWordRows + std::countr_zero(bits)));
  }
}

// The latest step that any key was seen in, or came in.
std::int64_t Index::Impl::latest_step() const noexcept {
  std::int64_t latest = admission ? admission->latest_step() : INT64_MIN;
  if (!evictor) return latest;
  for_each_meta([&](const std::int64_t* words) {
    latest = std::max(latest, evictor->meta().latest_step(words));
  });
  return latest;
}

// The latest time that came with any key; absent: none did.
std::optional<std::int64_t> Index::Impl::latest_time() const noexcept {
  if (!evictor || !evictor->meta().is_by_time()) return std::nullopt;
  std::int64_t latest = kNoTime;
  for_each_meta(
      [&](const std::int64_t* words) { latest = std::max(latest, evictor->meta().time(words)); });
  return latest == kNoTime ? std::nullopt : std::optional(latest);
}

// What is kept of keys is in the order of steps, so the clock does not stand before any of them.
void Index::Impl::set_state(const EvictionState& state) noexcept {
  clock = {.step = state.step,
           .lease_step = state.lease_step,
           .is_begun = state.is_begun,
           .time = state.time ? state.time : latest_time()};
  const std::int64_t latest = latest_step();
  if (latest > clock.step) {
    clock.step = latest;
    clock.is_begun = true;
  }
  // The first lease says where the clock begins. Leases ascend, so the next of a table that goes
  // back to before its first one cannot say so again: it is one step after none.
  had_leases = had_leases || last_step || state.had_leases;
}

void Index::set_time(std::int64_t time) {
  if (!impl_->evictor || !impl_->evictor->meta().is_by_time()) {
    throw std::invalid_argument(impl_->title +
                                ": a time is set, and only eviction by time takes it");
  }
  impl_->check_time("time", time);
  const std::unique_lock lock(impl_->mutex);
  impl_->clock.time = time;
}

std::optional<std::int64_t> Index::time() const {
  const std::shared_lock lock(impl_->mutex);
  return impl_->clock.time;
}

}  // namespace recsdk
