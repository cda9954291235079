// Construction, and the calls that find keys and take them out. How keys come in is in
// insertion.cc.
#include "recsdk/index.h"

#include <algorithm>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include "index/config.h"
#include "index/index_impl.h"
#include "recsdk/runtime.h"
#include "util/apart.h"
#include "util/must.h"
#include "util/prefetch.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::CallArray;
using internal::groups_of;
using internal::kItemsAhead;
using internal::LeaseRecord;
using internal::OutcomeCounts;
using internal::record_groups_of;
using internal::RowState;
using internal::validated;

namespace {

constexpr std::int64_t kFindGrain = 4096;  // keys a piece of a parallel find

std::uint64_t random_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

namespace internal {

void add_counts(AtomicCounts& counters, const OutcomeCounts& counts) noexcept {
  for (std::size_t o = 0; o < counts.size(); ++o) {
    if (counts[o] != 0) counters[o].fetch_add(counts[o], std::memory_order_relaxed);
  }
}

OutcomeCounts count_outcomes(const Outcome* outcomes, std::int64_t n) {
  // Blocks so short that their counts fit into bytes: so the compiler keeps them in registers.
  constexpr std::int64_t kBlock = 128;
  OutcomeCounts counts{};
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(n, begin + kBlock);
    std::uint8_t block[kNumOutcomes] = {};
    for (int o = 0; o < kNumOutcomes; ++o) {
      std::uint8_t sum = 0;
      for (std::int64_t i = begin; i < end; ++i)
        sum = static_cast<std::uint8_t>(sum + (outcomes[i] == static_cast<Outcome>(o)));
      block[o] = sum;
    }
    for (std::size_t o = 0; o < counts.size(); ++o) counts[o] += block[o];
  }
  return counts;
}

}  // namespace internal

RowMaker::~RowMaker() = default;
void RowMaker::prepare(RowNumber /*end*/, std::span<const std::uint32_t> /*reused*/) {}
void RowMaker::check(std::span<const Key> /*keys*/) {}
void RowMaker::show(std::span<const std::uint32_t> /*rows*/) noexcept {}
void RowMaker::norms(std::span<const std::uint32_t> /*rows*/, std::span<float> /*norms*/) const {
  throw std::logic_error("this maker of rows takes no norms");
}

Index::Impl::Impl(IndexConfig index_config, std::string title_of_messages,
                  std::shared_ptr<RowMaker> maker_of_rows)
    : config(validated(std::move(index_config), title_of_messages)),
      title(std::move(title_of_messages)),
      hash_seed(config.hash_seed ? *config.hash_seed : random_seed()),
      maker(std::move(maker_of_rows)),
      key_map(hash_seed),
      numbers(config.eviction ? internal::RowMeta(*config.eviction).num_words() : 0) {
  const std::optional<std::int64_t> groups = groups_of(config);
  if (config.admission)
    admission.emplace(*config.admission, record_groups_of(config),
                      config.record_groups ? std::nullopt : config.owned_groups, hash_seed);
  if (groups) {
    capacity.emplace(*config.max_rows, *groups, config.owned_groups);
  } else if (config.eviction) {
    capacity.emplace(internal::kMaxRows, 1, std::nullopt);  // of keys that expire: never full
  }
  if (!config.eviction) return;
  if (config.eviction->order == EvictOrder::kLowNorm && !(this->maker && this->maker->has_norms()))
    throw std::invalid_argument(title +
                                ": eviction by low norm reads weights, which this index has not; "
                                "take a table, or give a maker of rows that has norms");
  evictor.emplace(*config.eviction, capacity->num_groups());
  if (config.eviction->order == EvictOrder::kFunction) unmeasured.emplace();
  if (config.eviction->churn_steps)
    churn.emplace(*config.eviction, groups, config.owned_groups, hash_seed);
}

int Index::Impl::max_threads() const {
  return config.num_threads ? *config.num_threads : num_threads();
}

void Index::Impl::find(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const {
  internal::parallel_for(static_cast<std::int64_t>(keys.size()), kFindGrain, max_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           key_map.find(keys.subspan(static_cast<std::size_t>(begin),
                                                     static_cast<std::size_t>(end - begin)),
                                        rows_out + begin, outcomes + begin);
                         });
}

void Index::Impl::find_visible(std::span<const Key> keys, RowNumber* rows_out,
                               Outcome* outcomes) const {
  find(keys, rows_out, outcomes);
  if (num_in_flight > 0) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (outcomes[i] == Outcome::kFound && numbers.state(rows_out[i]) == RowState::kInFlight)
        outcomes[i] = Outcome::kMissing;
    }
  }
  for (std::size_t i = 0; num_leaving > 0 && i < keys.size(); ++i) {
    if (outcomes[i] != Outcome::kMissing) continue;
    const std::optional<std::uint32_t> row = find_leaving(keys[i]);
    if (!row) continue;
    rows_out[i] = *row;
    outcomes[i] = Outcome::kFound;
  }
  point_to_defaults(keys, rows_out, outcomes);
}

void Index::Impl::point_to_defaults(std::span<const Key> keys, RowNumber* rows_out,
                                    const Outcome* outcomes) const noexcept {
  const DefaultConfig& reads = config.default_row;
  if (reads.kind == DefaultKind::kConstant) return;
  const bool is_shared = reads.kind == DefaultKind::kSharedRows;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!has_row(outcomes[i]))
      rows_out[i] = is_shared ? shared_row(keys[i], reads.num_rows) : keys[i];
  }
}

void Index::Impl::require_no_steps(const char* call) const {
  if (open_steps.empty()) return;
  throw Error(ErrorCode::kBusy, title + ": " + call +
                                    " is not allowed while batches are in flight (steps " +
                                    std::to_string(*open_steps.front()->step) + " to " +
                                    std::to_string(*open_steps.back()->step) +
                                    "); finish or drop them, and release their leases, first");
}

void Index::Impl::require_idle(const char* what) const {
  if (open_leases.empty() && open_steps.empty() && !is_cut) return;
  throw Error(ErrorCode::kBusy, title + ": " + what +
                                    " is not allowed while leases or a cut are open; release and "
                                    "finish them first");
}

void Index::Impl::require_alone(const char* call) const {
  if (!is_of_table) return;
  throw std::invalid_argument(title + ": its index does not take " + call +
                              "; replace and cut keys with their rows, by Restore and Table::cut");
}

void Index::Impl::check_sizes(std::size_t num_keys, std::size_t num_outcomes) const {
  if (num_outcomes == num_keys) return;
  throw std::invalid_argument(title + ": " +
                              internal::must_fit_keys("outcomes", num_keys, num_outcomes));
}

void Index::Impl::check_rows(std::size_t num_keys, std::size_t num_rows) const {
  if (num_rows == num_keys) return;
  throw std::invalid_argument(title + ": " + internal::must_fit_keys("rows", num_keys, num_rows));
}

// Keys that a call has written over would be inserted in place of those that came, and what comes
// with keys is read once rows are written.
void Index::Impl::check_apart(std::span<const Key> keys, const CallArray& written,
                              std::span<const Outcome> outcomes, const KeyData& data) const {
  const CallArray of_outcomes("outcomes", outcomes);
  for (const CallArray& each : {written, of_outcomes}) {
    internal::require_apart(each,
                            {{"keys", keys},
                             {"times", data.times},
                             {"scores", data.scores},
                             {"counts", data.counts},
                             {"clicks", data.clicks}},
                            [&] { return title; });
  }
  internal::require_apart(written, {of_outcomes}, [&] { return title; });
}

void Index::Impl::check_outcomes(std::span<const Key> keys, std::span<const Outcome> outcomes,
                                 std::initializer_list<CallArray> beside) const {
  if (outcomes.empty()) return;
  check_sizes(keys.size(), outcomes.size());
  const CallArray written("outcomes", outcomes);
  internal::require_apart(written, {{"keys", keys}}, [&] { return title; });
  internal::require_apart(written, beside, [&] { return title; });
}

Outcome Index::Impl::erase_one(Key key) noexcept {
  if (admission) admission->forget(key);
  if (churn) churn->forget(key);
  const auto row = key_map.erase(key);
  if (!row) return Outcome::kMissing;
  numbers.free(*row, next_epoch);
  note_left(key, *row, LeaveCause::kErased);
  if (capacity) capacity->remove(key);
  if (evictor) evictor->note_erased(key, numbers, *capacity);
  ++num_erased;
  return Outcome::kFound;
}

void Index::Impl::erase(std::span<const Key> keys, Outcome* outcomes) {
  require_no_steps("erase");
  numbers.prepare_free(static_cast<std::int64_t>(keys.size()));
  prepare_erasing(keys);
  OutcomeCounts counts{};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kItemsAhead < keys.size()) key_map.prefetch(keys[i + kItemsAhead]);
    const Outcome outcome = erase_one(keys[i]);
    ++counts[static_cast<std::size_t>(outcome)];
    if (outcomes != nullptr) outcomes[i] = outcome;
  }
  count(counts);
  release_kept_rows();
}

void Index::Impl::clear() {
  require_no_steps("clear");
  numbers.prepare_free(key_map.size());
  const std::int64_t num_places = has_reader() ? leavers->reserve(key_map.size()) : 0;
  note_leaving(num_places, [&] { tracker->note_all_erased(key_map); });
  for (RowNumber n = numbers.end(); n-- > 0;) {  // so that the lowest row is given next
    const auto row = static_cast<std::uint32_t>(n);
    if (numbers.state(n) == RowState::kFree) continue;
    numbers.free(row, next_epoch);
    note_left(numbers.key(n), row, LeaveCause::kErased);
  }
  num_erased += static_cast<std::uint64_t>(key_map.size());
  key_map.clear();
  if (capacity) capacity->clear();
  if (evictor) evictor->forget();
  if (admission) admission->clear();
  if (churn) churn->clear();
  release_kept_rows();
}

Index::Index(IndexConfig config, std::shared_ptr<RowMaker> maker) {
  std::string title = "index '" + config.name + "'";
  impl_ = std::make_shared<Impl>(std::move(config), std::move(title), std::move(maker));
}
Index::Index(Adopt /*adopt*/, std::shared_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

// Leases and cuts outlive the index, and the maker may hold some of them: it must not be kept by
// them in turn.
Index::~Index() { impl_->drop_maker(); }

const IndexConfig& Index::config() const noexcept { return impl_->config; }

Lease Index::lease(std::optional<std::int64_t> step) { return Impl::take_lease(impl_, step); }

void Index::Impl::require_below(RowNumber end) const {
  if (numbers.end() <= end) return;
  throw std::invalid_argument(
      title + ": " +
      internal::must("its row numbers",
                     "be at most " + std::to_string(end - 1) + " to fit a store's",
                     "up to " + std::to_string(numbers.end() - 1)) +
      "; pass int64 numbers");
}

void Index::Impl::map(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                      const MapOptions& options, std::optional<RowNumber> end) {
  const std::shared_ptr<LeaseRecord> record = check_lease(options.lease);
  if (options.insert) {
    const std::unique_lock lock(mutex);
    internal::Then then;
    if (end) {
      then = [&] {
        require_below(*end);
        check_defaults(keys, outcomes);
      };
    }
    map_inserting(keys, rows_out, outcomes, record.get(), options.data, then, options.admits_all);
    return;
  }
  const std::shared_lock lock(mutex);
  require_open(record.get());
  if (end) require_below(*end);
  const bool in_flight = record != nullptr && record->step;
  if (in_flight) {
    // It sees what earlier batches have inserted.
    find(keys, rows_out, outcomes);
    point_to_defaults(keys, rows_out, outcomes);
  } else {
    find_visible(keys, rows_out, outcomes);
  }
  internal::add_counts(in_flight ? record->outcomes : outcome_counts,
                       internal::count_outcomes(outcomes, static_cast<std::int64_t>(keys.size())));
}

void Index::map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
                const MapOptions& options) {
  impl_->check_sizes(keys.size(), outcomes.size());
  impl_->check_rows(keys.size(), rows.size());
  impl_->check_apart(keys, {"rows", rows}, outcomes, options.data);
  impl_->check_data(keys.size(), options.data, options.insert, options.admits_all);
  impl_->check_admits_all(options);
  impl_->map(keys, rows.data(), outcomes.data(), options, std::nullopt);
}

void Index::erase(std::span<const Key> keys, std::span<Outcome> outcomes) {
  impl_->check_outcomes(keys, outcomes);
  const std::unique_lock lock(impl_->mutex);
  impl_->erase(keys, outcomes.empty() ? nullptr : outcomes.data());
}

void Index::clear() {
  const std::unique_lock lock(impl_->mutex);
  impl_->clear();
}

}  // namespace recsdk
