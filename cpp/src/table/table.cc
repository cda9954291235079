// Construction, and the calls that address rows by key.
#include "recsdk/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include "recsdk/runtime.h"
#include "rows/row_values.h"
#include "table/table_impl.h"
#include "util/number_text.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::Insertion;
using internal::LeaseRecord;
using internal::OutcomeCounts;
using internal::RowAddresses;
using internal::RowState;

namespace {

constexpr std::int64_t kFindGrain = 4096;   // keys a piece of a parallel find
constexpr std::size_t kInsertGrain = 4096;  // keys that are found, then inserted, at a time
constexpr std::int64_t kRowGrain = 1024;    // rows a piece of a parallel copy or initialization

TableConfig validated(TableConfig config) {
  const std::string title = "table '" + config.name + "': ";
  if (config.name.empty()) throw std::invalid_argument("a table's name is empty; give it one");
  if (config.max_rows && *config.max_rows < 0) {
    throw std::invalid_argument(title + "max_rows is " + std::to_string(*config.max_rows) +
                                "; pass 0 or more, or leave it out for no limit");
  }
  if (config.num_threads && *config.num_threads < 1) {
    throw std::invalid_argument(title + "num_threads is " + std::to_string(*config.num_threads) +
                                "; pass 1 or more, or leave it out for all threads of the pool");
  }
  if (!std::isfinite(config.default_value)) {
    throw std::invalid_argument(title + "default_value is not a finite float; pass one");
  }
  if (config.rounding > Rounding::kNearest) {
    throw std::invalid_argument(title + "rounding is " +
                                std::to_string(static_cast<int>(config.rounding)) +
                                "; pass one of Rounding");
  }
  if (config.on_nonfinite > NonFinite::kSkip) {
    throw std::invalid_argument(title + "on_nonfinite is " +
                                std::to_string(static_cast<int>(config.on_nonfinite)) +
                                "; pass one of NonFinite");
  }
  if (config.on_full > OnFull::kRaise) {
    throw std::invalid_argument(title + "on_full is " +
                                std::to_string(static_cast<int>(config.on_full)) +
                                "; pass one of OnFull");
  }
  config.optimizer.validate();
  config.initializer.validate();
  // A wrong RECSDK_ISA or RECSDK_NUM_THREADS fails here rather than half-way through a call.
  internal::kernels();
  num_threads();
  return config;
}

[[noreturn, gnu::cold]] void throw_full(const std::string& title, std::int64_t max_rows) {
  throw Error(ErrorCode::kCapacity, title + " is full: " + std::to_string(max_rows) + " of " +
                                        std::to_string(max_rows) +
                                        " rows are used; raise max_rows, erase keys, or set "
                                        "on_full to refuse");
}

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

Table::Impl::Impl(TableConfig table_config)
    : config(validated(std::move(table_config))),
      layout(RowLayout::make(config.dim, config.optimizer, config.weight_dtype)),
      table_hash(recsdk::table_hash(config.name)),
      hash_seed(config.hash_seed ? *config.hash_seed : random_seed()),
      index(hash_seed),
      rows(layout),
      learning_rate(config.optimizer.learning_rate),
      cut_memory(hash_seed, internal::CutState::copy_bytes(layout)) {}

int Table::Impl::max_threads() const {
  return config.num_threads ? *config.num_threads : num_threads();
}

void Table::Impl::find(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes) const {
  internal::parallel_for(static_cast<std::int64_t>(keys.size()), kFindGrain, max_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           index.find(keys.subspan(static_cast<std::size_t>(begin),
                                                   static_cast<std::size_t>(end - begin)),
                                      rows_out + begin, outcomes + begin);
                         });
}

void Table::Impl::find_visible(std::span<const Key> keys, RowNumber* rows_out,
                               Outcome* outcomes) const {
  find(keys, rows_out, outcomes);
  if (num_in_flight == 0) return;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kFound && rows.state(rows_out[i]) == RowState::kInFlight) {
      outcomes[i] = Outcome::kMissing;
    }
  }
}

// Finds keys and gives rows to those that have none, in input order. May throw half-way:
// `insertion` says what was done.
void Table::Impl::find_or_insert(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  insertion.old_end = rows.end();
  if (index.size() == 0) is_mostly_new = true;
  for (std::size_t begin = 0; begin < keys.size();) {
    const std::size_t left = keys.size() - begin;
    // One thread inserts piece by piece, while the buckets that it has looked at are in its cache.
    const std::size_t piece =
        max_threads() == 1 || is_mostly_new ? std::min(kInsertGrain, left) : left;
    const std::size_t old_count = insertion.rows.size();
    const auto part = keys.subspan(begin, piece);
    if (!is_mostly_new || !append_new(part, rows_out + begin, outcomes + begin, state, insertion)) {
      find(part, rows_out + begin, outcomes + begin);
      insert_missing(part, rows_out + begin, outcomes + begin, state, insertion);
    }
    begin += piece;
    const std::size_t num_new = insertion.rows.size() - old_count;
    is_mostly_new = 2 * num_new >= piece;
    if (is_mostly_new)
      index.expect(static_cast<std::int64_t>(num_new * (keys.size() - begin) / piece));
  }
}

// Inserts keys most of which have no row yet, without looking for them first. False if that cannot
// be done.
bool Table::Impl::append_new(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                             RowState state, Insertion& insertion) {
  const auto count = static_cast<std::int64_t>(keys.size());
  if (config.max_rows && *config.max_rows - index.size() < count) return false;
  if (!index.can_insert() || !rows.prepare_append(count)) return false;
  insertion.make_room(keys.size());
  if (tracker != nullptr) tracker->grow(rows.end() + count);
  std::size_t num_done = 0;
  const auto give_rows = [&] {
    const auto first = static_cast<std::uint32_t>(rows.end());
    rows.append(keys.first(num_done), outcomes, state);
    const auto old_size = static_cast<std::ptrdiff_t>(insertion.rows.size());
    insertion.rows.resize(insertion.rows.size() + static_cast<std::size_t>(rows.end() - first));
    std::iota(insertion.rows.begin() + old_size, insertion.rows.end(), first);
  };
  try {
    index.insert(keys, static_cast<std::uint32_t>(rows.end()), rows_out, outcomes, num_done);
  } catch (...) {
    give_rows();  // for undo
    throw;
  }
  give_rows();
  return true;
}

// Gives rows to the keys that find has left kMissing.
void Table::Impl::insert_missing(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  const std::int64_t num_missing = std::count(outcomes, outcomes + keys.size(), Outcome::kMissing);
  const std::int64_t limit = config.max_rows.value_or(std::numeric_limits<std::int64_t>::max());
  const std::int64_t admissible =
      std::min(num_missing, std::max<std::int64_t>(limit - index.size(), 0));
  insertion.make_room(static_cast<std::size_t>(admissible));
  rows.prepare_allocate(admissible);
  if (tracker != nullptr) tracker->grow(rows.end() + admissible);
  // A cut may still need what lies in rows that are used again.
  if (open_cut != nullptr) open_cut->preserve_rows(rows.reusable(admissible), copy_waits);

  constexpr std::int64_t kChunk = 1024;
  std::array<std::uint16_t, kChunk> missing;
  for (std::size_t begin = 0; begin < keys.size(); begin += kChunk) {
    const std::size_t end = std::min(keys.size(), begin + kChunk);
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      missing[count] = static_cast<std::uint16_t>(i - begin);
      count += static_cast<std::size_t>(outcomes[i] == Outcome::kMissing);
    }
    insert_chunk(keys.data() + begin, {missing.data(), count}, limit, rows_out + begin,
                 outcomes + begin, state, insertion);
  }
}

void Table::Impl::insert_chunk(const Key* keys, std::span<const std::uint16_t> missing,
                               std::int64_t limit, RowNumber* rows_out, Outcome* outcomes,
                               RowState state, Insertion& insertion) {
  constexpr std::size_t kAhead = 16;
  for (std::size_t j = 0; j < std::min(kAhead, missing.size()); ++j)
    index.prefetch(keys[missing[j]]);
  for (std::size_t j = 0; j < missing.size(); ++j) {
    if (j + kAhead < missing.size()) index.prefetch(keys[missing[j + kAhead]]);
    const std::size_t i = missing[j];
    // A key may have been inserted by this very call.
    if (index.size() >= limit) {
      const auto row = index.find_one(keys[i]);
      if (!row && config.on_full == OnFull::kRaise) throw_full(title(), limit);
      outcomes[i] = row ? Outcome::kFound : Outcome::kRefused;
      if (row) rows_out[i] = *row;
      continue;
    }
    const std::uint32_t next = rows.next_to_allocate();
    const std::uint32_t row = index.find_or_insert(keys[i], next);
    rows_out[i] = row;
    outcomes[i] = row == next ? Outcome::kInserted : Outcome::kFound;
    if (row == next) insertion.rows.push_back(rows.allocate(keys[i], state));
  }
}

void Table::Impl::undo(const Insertion& insertion) noexcept {
  for (std::size_t j = insertion.rows.size(); j-- > 0;) {
    index.erase(rows.key(insertion.rows[j]));
    rows.undo_allocate(insertion.rows[j], insertion.old_end);
  }
}

// New memory comes in huge pages, which the system clears when they are first touched: up to
// milliseconds each. Large tables have that done ahead, about as many pages a call as it uses, so
// that no call meets those of index, keys and records together.
void Table::Impl::populate_ahead(std::int64_t num_new) noexcept {
  if (num_new == 0) return;
  constexpr std::int64_t kIndexAndKey = 32;  // bytes a row, about
  std::int64_t num_pages = 1 + num_new * (layout.row_bytes() + kIndexAndKey) /
                                   static_cast<std::int64_t>(internal::kHugePage);
  const bool has_records = !make_rows;
  while (num_pages-- > 0 && (index.populate_ahead() || rows.populate_ahead(has_records))) {
  }
}

void Table::Impl::initialize_state(const std::uint32_t* row_numbers, std::int64_t n) {
  if (layout.fields.size() < 2) return;
  internal::parallel_for(n, kRowGrain, max_threads(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      internal::reset_state(layout, rows.records(), row_numbers[i]);
  });
}

// Asks the custom initializer for the weights of new rows.
std::vector<float> Table::Impl::custom_weights(const Insertion& insertion) const {
  std::vector<Key> keys;
  keys.reserve(insertion.rows.size());
  for (const std::uint32_t row : insertion.rows) keys.push_back(rows.key(row));
  std::vector<float> weights(keys.size() * static_cast<std::size_t>(config.dim));
  const internal::FairMutex::CallbackScope scope(index_mutex);
  config.initializer.callback(keys, weights.data());
  return weights;
}

void Table::Impl::initialize(const Insertion& insertion) {
  if (make_rows) return make_rows(insertion.rows);
  const auto n = static_cast<std::int64_t>(insertion.rows.size());
  const std::int64_t dim = config.dim;
  const std::uint32_t* const numbers = insertion.rows.data();
  if (config.initializer.kind == InitializerKind::kCustom && n > 0) {
    const std::vector<float> weights = custom_weights(insertion);
    for (std::int64_t i = 0; i < n; ++i)
      internal::write_weights(layout, rows.records(), numbers[i], weights.data() + i * dim);
  } else {
    internal::parallel_for(n, kRowGrain, max_threads(), [&](std::int64_t begin, std::int64_t end) {
      constexpr std::int64_t kPiece = 256;
      std::array<Key, kPiece> keys;
      for (; begin < end; begin += kPiece) {
        const std::int64_t count = std::min(kPiece, end - begin);
        std::transform(numbers + begin, numbers + begin + count, keys.begin(),
                       [&](std::uint32_t row) { return rows.key(row); });
        internal::kernels().initialize({&config.initializer, config.seed, table_hash, dim,
                                        keys.data(), count, rows.records(), config.weight_dtype,
                                        numbers + begin, nullptr});
      }
    });
  }
  initialize_state(numbers, n);
}

void Table::Impl::map_inserting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                LeaseRecord* record) {
  const bool in_flight = record != nullptr && record->step.has_value();
  require_open(record);
  if (!in_flight) require_no_steps("inserting without a step");
  Insertion insertion;
  try {
    find_or_insert(keys, rows_out, outcomes, in_flight ? RowState::kInFlight : RowState::kVisible,
                   insertion);
    if (in_flight) {
      std::vector<std::uint32_t>& known = record->new_rows;
      // Doubling, as push_back would.
      const std::size_t needed = known.size() + insertion.rows.size();
      if (known.capacity() < needed) known.reserve(std::max(needed, 2 * known.capacity()));
    }
    initialize(insertion);
    require_open(record);  // a custom initializer may have released it
  } catch (...) {
    undo(insertion);
    throw;
  }
  index.adapt(static_cast<std::int64_t>(insertion.rows.size()));
  populate_ahead(static_cast<std::int64_t>(insertion.rows.size()));
  const OutcomeCounts counts =
      internal::count_outcomes(outcomes, static_cast<std::int64_t>(keys.size()));
  if (!in_flight) {
    note_visible(insertion.rows);
    count(counts);
    return;
  }
  record->new_rows.insert(record->new_rows.end(), insertion.rows.begin(), insertion.rows.end());
  internal::add_counts(record->outcomes, counts);
  num_in_flight += static_cast<std::int64_t>(insertion.rows.size());
}

void Table::Impl::note_visible(const std::vector<std::uint32_t>& row_numbers) noexcept {
  if (tracker == nullptr) return;
  for (const std::uint32_t row : row_numbers) tracker->note_visible(row, rows.key(row));
}

void Table::Impl::require_no_steps(const char* call) const {
  if (open_steps.empty()) return;
  throw Error(ErrorCode::kBusy, title() + ": " + call +
                                    " is not allowed while batches are in flight (steps " +
                                    std::to_string(*open_steps.front()->step) + " to " +
                                    std::to_string(*open_steps.back()->step) +
                                    "); finish or drop them, and release their leases, first");
}

void Table::Impl::count(const OutcomeCounts& counts) const noexcept {
  internal::add_counts(outcome_counts, counts);
}

void Table::Impl::gather(const RowNumber* row_numbers, const Outcome* outcomes, std::int64_t n,
                         float* values) const {
  internal::parallel_for(n, kRowGrain, max_threads(), [&](std::int64_t begin, std::int64_t end) {
    internal::kernels().gather({rows.records(), config.weight_dtype, config.dim,
                                config.default_value, row_numbers, outcomes, begin, end, values});
  });
}

void Table::Impl::check_sizes(std::size_t num_keys, std::size_t num_outcomes) const {
  if (num_outcomes == num_keys) return;
  throw std::invalid_argument(title() + ": outcomes has " + std::to_string(num_outcomes) +
                              " elements for " + std::to_string(num_keys) +
                              " keys; pass one per key");
}

void Table::Impl::check_rows(std::size_t num_keys, std::size_t num_rows) const {
  if (num_rows == num_keys) return;
  throw std::invalid_argument(title() + ": rows has " + std::to_string(num_rows) +
                              " elements for " + std::to_string(num_keys) +
                              " keys; pass one per key");
}

Table::Table(TableConfig config) : impl_(std::make_shared<Impl>(std::move(config))) {}
Table::~Table() = default;
Table::Table(Table&&) noexcept = default;
Table& Table::operator=(Table&&) noexcept = default;

const TableConfig& Table::config() const noexcept { return impl_->config; }
const RowLayout& Table::layout() const noexcept { return impl_->layout; }

void Table::map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
                const MapOptions& options) {
  impl_->check_sizes(keys.size(), outcomes.size());
  impl_->check_rows(keys.size(), rows.size());
  const std::shared_ptr<LeaseRecord> record = impl_->check_lease(options.lease);
  if (options.insert) {
    const std::unique_lock lock(impl_->index_mutex);
    impl_->map_inserting(keys, rows.data(), outcomes.data(), record.get());
    return;
  }
  const std::shared_lock lock(impl_->index_mutex);
  impl_->require_open(record.get());
  const bool in_flight = record != nullptr && record->step;
  if (in_flight) {
    // It sees what earlier batches have inserted.
    impl_->find(keys, rows.data(), outcomes.data());
  } else {
    impl_->find_visible(keys, rows.data(), outcomes.data());
  }
  internal::add_counts(
      in_flight ? record->outcomes : impl_->outcome_counts,
      internal::count_outcomes(outcomes.data(), static_cast<std::int64_t>(keys.size())));
}

void Table::lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes) const {
  if (!outcomes.empty()) impl_->check_sizes(keys.size(), outcomes.size());
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> own(outcomes.empty() ? keys.size() : 0);
  Outcome* const found = outcomes.empty() ? own.data() : outcomes.data();
  const auto n = static_cast<std::int64_t>(keys.size());
  const std::shared_lock lock(impl_->index_mutex);
  impl_->find_visible(keys, rows.data(), found);
  const std::shared_lock rows_lock(impl_->rows_mutex);
  impl_->gather(rows.data(), found, n, values);
  impl_->count(internal::count_outcomes(found, n));
}

void Table::find_or_insert(std::span<const Key> keys, float* values, std::span<Outcome> outcomes,
                           const Lease* lease) {
  if (!outcomes.empty()) impl_->check_sizes(keys.size(), outcomes.size());
  const std::shared_ptr<LeaseRecord> record = impl_->check_lease(lease);
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> own(outcomes.empty() ? keys.size() : 0);
  Outcome* const found = outcomes.empty() ? own.data() : outcomes.data();
  const std::unique_lock lock(impl_->index_mutex);
  impl_->map_inserting(keys, rows.data(), found, record.get());
  const std::shared_lock rows_lock(impl_->rows_mutex);
  impl_->gather(rows.data(), found, static_cast<std::int64_t>(keys.size()), values);
}

void Table::upsert(std::span<const Key> keys, const float* values, const float* state,
                   std::span<Outcome> outcomes) {
  if (!outcomes.empty()) impl_->check_sizes(keys.size(), outcomes.size());
  Impl& t = *impl_;
  std::vector<RowNumber> rows(keys.size());
  std::vector<Outcome> own(outcomes.empty() ? keys.size() : 0);
  Outcome* const found = outcomes.empty() ? own.data() : outcomes.data();
  const std::unique_lock lock(t.index_mutex);
  t.require_no_steps("upsert");
  Insertion insertion;
  try {
    t.find_or_insert(keys, rows.data(), found, RowState::kVisible, insertion);
    if (t.open_cut != nullptr) t.preserve_found(rows, found);
  } catch (...) {
    t.undo(insertion);
    throw;
  }
  t.index.adapt(static_cast<std::int64_t>(insertion.rows.size()));
  t.note_visible(insertion.rows);
  const std::unique_lock rows_lock(t.rows_mutex);
  const std::int64_t state_width = t.layout.state_width();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!has_row(found[i])) continue;
    if (t.tracker != nullptr) t.tracker->note_changed(rows[i]);
    const RowAddresses records = t.rows.records();
    internal::write_weights(t.layout, records, rows[i],
                            values + static_cast<std::int64_t>(i) * t.config.dim);
    if (state == nullptr) {
      internal::reset_state(t.layout, records, rows[i]);
    } else {
      internal::write_state(t.layout, records, rows[i],
                            state + static_cast<std::int64_t>(i) * state_width);
    }
  }
  t.count(internal::count_outcomes(found, static_cast<std::int64_t>(keys.size())));
}

void Table::Impl::preserve_found(std::span<const RowNumber> row_numbers, const Outcome* outcomes) {
  std::vector<std::uint32_t> found;
  found.reserve(row_numbers.size());
  for (std::size_t i = 0; i < row_numbers.size(); ++i) {
    if (has_row(outcomes[i])) found.push_back(static_cast<std::uint32_t>(row_numbers[i]));
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  open_cut->preserve_rows(found, copy_waits);
}

Outcome Table::Impl::erase_one(Key key) noexcept {
  const auto row = index.erase(key);
  if (!row) return Outcome::kMissing;
  rows.free(*row, next_epoch);
  ++num_erased;
  return Outcome::kFound;
}

void Table::erase(std::span<const Key> keys, std::span<Outcome> outcomes) {
  if (!outcomes.empty()) impl_->check_sizes(keys.size(), outcomes.size());
  const std::unique_lock lock(impl_->index_mutex);
  impl_->require_no_steps("erase");
  impl_->rows.prepare_free(static_cast<std::int64_t>(keys.size()));
  if (impl_->tracker != nullptr) impl_->tracker->note_leaving(keys, impl_->index);
  constexpr std::size_t kAhead = 16;
  OutcomeCounts counts{};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) impl_->index.prefetch(keys[i + kAhead]);
    const Outcome outcome = impl_->erase_one(keys[i]);
    ++counts[static_cast<std::size_t>(outcome)];
    if (!outcomes.empty()) outcomes[i] = outcome;
  }
  impl_->count(counts);
  impl_->release_kept_rows();
}

void Table::clear() {
  Impl& t = *impl_;
  const std::unique_lock lock(t.index_mutex);
  t.require_no_steps("clear");
  t.rows.prepare_free(t.index.size());
  if (t.tracker != nullptr) t.tracker->note_all_leaving(t.index);
  for (RowNumber row = t.rows.end(); row-- > 0;) {  // so that the lowest row is given next
    if (t.rows.state(row) != RowState::kFree)
      t.rows.free(static_cast<std::uint32_t>(row), t.next_epoch);
  }
  t.num_erased += static_cast<std::uint64_t>(t.index.size());
  t.index.clear();
  t.release_kept_rows();
}

float Table::learning_rate() const { return impl_->learning_rate.load(); }

void Table::set_learning_rate(float learning_rate) {
  OptimizerConfig changed = impl_->config.optimizer;
  changed.learning_rate = learning_rate;
  changed.validate();
  impl_->learning_rate.store(learning_rate);
}

std::uint64_t Table::update_count() const {
  const std::shared_lock lock(impl_->rows_mutex);
  return impl_->update_count;
}

void Table::Impl::check_update_count(std::uint64_t count) const {
  // Beyond it the next updates would count from 0 again.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  if (count > kMost) {
    throw std::invalid_argument(title() + ": update count " + std::to_string(count) +
                                " is out of range; pass at most " + std::to_string(kMost));
  }
}

void Table::set_update_count(std::uint64_t count) {
  impl_->check_update_count(count);
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->update_count = count;
}

double Table::log_decay() const {
  const std::shared_lock lock(impl_->rows_mutex);
  return impl_->log_decay;
}

void Table::Impl::check_log_decay(double value) const {
  const bool is_legal =
      config.optimizer.catch_up ? std::isfinite(value) && value <= 0.0 : value == 0.0;
  if (!is_legal) {
    throw std::invalid_argument(title() + ": log_decay " + internal::number_text(value) +
                                " is out of range; pass what log_decay() gave of a table with the "
                                "same optimizer, 0 or less and 0 without catch_up");
  }
}

void Table::set_log_decay(double log_decay) {
  impl_->check_log_decay(log_decay);
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->log_decay = log_decay;
}

}  // namespace recsdk
