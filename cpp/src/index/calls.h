// What an index remembers of a call, and of a batch in flight.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "admission/admission.h"
#include "eviction/evictor.h"
#include "index/change_tracker.h"
#include "recsdk/index.h"
#include "util/fair_mutex.h"
#include "util/huge_allocator.h"
#include "util/unset_allocator.h"

namespace recsdk::internal {

using OutcomeCounts = std::array<std::uint64_t, kNumOutcomes>;
using AtomicCounts = std::array<std::atomic<std::uint64_t>, kNumOutcomes>;

/// Adds counts to counters.
void add_counts(AtomicCounts& counters, const OutcomeCounts& counts) noexcept;

/// Counts the outcomes of one call.
OutcomeCounts count_outcomes(const Outcome* outcomes, std::int64_t n);

/// The steps that an index with eviction or admission has seen.
struct EvictionClock {
  std::int64_t step = 0;                   // of the last call that decided
  std::optional<std::int64_t> lease_step;  // its lease's
  bool is_begun = false;
  std::optional<std::int64_t> time;  // the latest that came with keys, or what was set since
  std::uint64_t num_calls = 0;       // that decided since it was set
};

/// Keys that leave as a tracker of changes takes them.
inline std::vector<LeftKey> left_keys(std::span<const Evictor::Victim> victims) {
  std::vector<LeftKey> leaving(victims.size());
  std::transform(victims.begin(), victims.end(), leaving.begin(),
                 [](const Evictor::Victim& victim) { return LeftKey{victim.cause, victim.key}; });
  return leaving;
}

/// A call with admission: the next number of all such calls, and where its records begin among
/// those of its batch. Batches of one step may call in any order.
struct AdmittingCall {
  std::uint64_t number = 0;
  std::size_t first_record = 0;
};

/// A batch in flight, as the index sees it.
struct LeaseRecord : FairMutex::Deferred {
  explicit LeaseRecord(Index::Impl& of) : index(&of) {}
  void run() noexcept override;  // ends the batch, under the mutex

  Index::Impl* index;
  std::uint64_t epoch = 0;
  std::optional<std::int64_t> step;
  std::atomic<bool> is_ending{false};    // somebody releases it, or has
  std::atomic<bool> is_released{false};  // it ends before whatever takes the mutex next
  bool has_ended = false;                // changed under the mutex
  std::vector<std::uint32_t> new_rows;   // that only later batches see
  AtomicCounts outcomes{};               // to be counted when the batch becomes visible
  std::uint64_t num_returned = 0;        // the same

  std::vector<Evictor::Victim> evicted;  // ascending; readers still find their rows
  // Rows whose metadata it changed, each with their words from before; some several times.
  std::vector<std::int64_t, UnsetAllocator<std::int64_t>> touched;
  std::optional<RowKinds::Before> kinds_before;  // it has begun with a look that placed kinds
  std::vector<AdmitRecord> records_before;       // that it changed; count 0: there was none
  std::vector<AdmittingCall> admitting;          // whose records these are
  std::optional<EvictionClock> clock_before;     // its first call
  bool shares_step = false;                      // with a lease before
};

/// Rows that one call gave to keys, so that it can take them back.
struct Insertion {
  std::vector<std::uint32_t, UnsetAllocator<std::uint32_t>> rows;
  RowNumber old_end = 0;
  // With eviction: what comes with the keys, the step, and the rows whose keys leave for them.
  KeyData data = {};
  std::int64_t step = 0;
  std::optional<std::int64_t> time;  // of the clock after it
  std::vector<Evictor::Victim> victims;
  std::vector<Evictor::Victim> expired;  // not counted any more, and marked while others are chosen
  std::vector<std::uint64_t, UnsetAllocator<std::uint64_t>> hashes;  // of the keys of `rows`
  // With looks that measure: the rows that it looked at, and those that it found changed.
  std::vector<std::uint32_t> looked_at;
  std::vector<Measured, HugeAllocator<Measured>> measured;
  std::optional<RowKinds::Before> kinds_before;  // if kinds of rows were placed instead
  std::int64_t num_places = 0;                   // reserved in the queue of what leaves
  // With admission.
  bool admits_all = false;
  AdmissionCall admission;

  /// Makes room for `count` more rows: doubling, as push_back would.
  void make_room(std::size_t count) {
    const std::size_t needed = rows.size() + count;
    if (rows.capacity() < needed) rows.reserve(std::max(needed, 2 * rows.capacity()));
  }
};

/// Runs within an insertion, once its rows are made. If it throws, the insertion is taken back.
using Then = std::function<void()>;

/// Row numbers and outcomes of keys (N,); the outcomes are the caller's if it wants them.
struct Found {
  Found(std::size_t num_keys, std::span<Outcome> wanted)
      : rows(num_keys),
        own(wanted.empty() ? num_keys : 0),
        outcomes(wanted.empty() ? std::span<Outcome>(own) : wanted) {}

  OutcomeCounts counts() const {
    return count_outcomes(outcomes.data(), static_cast<std::int64_t>(outcomes.size()));
  }

  std::vector<RowNumber> rows;
  std::vector<Outcome> own;
  std::span<Outcome> outcomes;
};

}  // namespace recsdk::internal
