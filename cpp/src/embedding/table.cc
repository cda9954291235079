// Construction, and the calls that address rows by key.
#include "recsdk/table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>

#include "embedding/table_impl.h"
#include "recsdk/runtime.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::Insertion;
using internal::LeaseRecord;
using internal::OutcomeCounts;
using internal::RowState;

namespace {

constexpr std::int64_t kFindGrain = 16384;  // keys a piece of a parallel find
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
  config.optimizer.validate();
  config.initializer.validate();
  internal::kernels();  // a wrong RECSDK_ISA fails here rather than half-way through a call
  return config;
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
  OutcomeCounts counts{};
  for (std::int64_t i = 0; i < n; ++i) ++counts[static_cast<std::size_t>(outcomes[i])];
  return counts;
}

}  // namespace internal

Table::Impl::Impl(TableConfig table_config)
    : config(validated(std::move(table_config))),
      layout(RowLayout::make(config.dim, config.optimizer)),
      table_hash(recsdk::table_hash(config.name)),
      index(config.hash_seed ? *config.hash_seed : random_seed()),
      rows(layout),
      learning_rate(config.optimizer.learning_rate) {}

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

// Gives rows to the keys that find has left kMissing, in input order. May throw half-way:
// `insertion` says what was done.
void Table::Impl::insert_missing(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                 RowState state, Insertion& insertion) {
  std::vector<std::size_t> missing;
  missing.reserve(
      static_cast<std::size_t>(std::count(outcomes, outcomes + keys.size(), Outcome::kMissing)));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (outcomes[i] == Outcome::kMissing) missing.push_back(i);
  }
  const std::int64_t limit = config.max_rows.value_or(std::numeric_limits<std::int64_t>::max());
  const std::int64_t admissible = std::min(static_cast<std::int64_t>(missing.size()),
                                           std::max<std::int64_t>(limit - index.size(), 0));
  insertion.old_end = rows.end();
  insertion.keys.reserve(static_cast<std::size_t>(admissible));
  insertion.rows.reserve(static_cast<std::size_t>(admissible));
  rows.prepare_allocate(admissible);

  constexpr std::size_t kAhead = 16;
  for (std::size_t j = 0; j < missing.size(); ++j) {
    if (j + kAhead < missing.size()) index.prefetch(keys[missing[j + kAhead]]);
    const std::size_t i = missing[j];
    if (const auto row = index.find_one(keys[i])) {  // inserted by this very call
      rows_out[i] = *row;
      outcomes[i] = Outcome::kFound;
    } else if (index.size() >= limit) {
      outcomes[i] = Outcome::kRefused;
    } else {
      const std::uint32_t row_number = rows.allocate(keys[i], state);
      insertion.keys.push_back(keys[i]);
      insertion.rows.push_back(row_number);
      index.insert(keys[i], row_number);
      rows_out[i] = row_number;
      outcomes[i] = Outcome::kInserted;
    }
  }
}

void Table::Impl::undo(const Insertion& insertion) noexcept {
  for (std::size_t j = insertion.keys.size(); j-- > 0;) {
    index.erase(insertion.keys[j]);
    rows.undo_allocate(insertion.rows[j], insertion.old_end);
  }
}

void Table::Impl::initialize_state(const std::uint32_t* row_numbers, std::int64_t n) {
  if (layout.fields.size() < 2) return;
  internal::parallel_for(n, kRowGrain, max_threads(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float* const record = rows.records().row(row_numbers[i]);
      for (std::size_t f = 1; f < layout.fields.size(); ++f) {
        const RowField& field = layout.fields[f];
        std::fill_n(record + field.offset / 4, field.count, field.initial_value);
      }
    }
  });
}

void Table::Impl::initialize(const Insertion& insertion) {
  const auto n = static_cast<std::int64_t>(insertion.keys.size());
  const std::int64_t dim = config.dim;
  std::vector<float> custom;
  if (config.initializer.kind == InitializerKind::kCustom && n > 0) {
    custom.resize(static_cast<std::size_t>(n * dim));
    const internal::FairMutex::CallbackScope scope(index_mutex);
    config.initializer.callback(insertion.keys, custom.data());
  }
  internal::parallel_for(n, kRowGrain, max_threads(), [&](std::int64_t begin, std::int64_t end) {
    if (!custom.empty()) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::copy_n(custom.data() + i * dim, dim,
                    rows.records().row(insertion.rows[static_cast<std::size_t>(i)]));
      }
      return;
    }
    internal::kernels().initialize({&config.initializer, config.seed, table_hash, dim,
                                    insertion.keys.data() + begin, end - begin, rows.records(),
                                    insertion.rows.data() + begin, nullptr});
  });
  initialize_state(insertion.rows.data(), n);
}

void Table::Impl::map_inserting(std::span<const Key> keys, RowNumber* rows_out, Outcome* outcomes,
                                LeaseRecord* record) {
  const bool in_flight = record != nullptr && record->step.has_value();
  require_open(record);
  if (!in_flight) require_no_steps("inserting without a step");
  find(keys, rows_out, outcomes);
  Insertion insertion;
  try {
    insert_missing(keys, rows_out, outcomes, in_flight ? RowState::kInFlight : RowState::kVisible,
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
  const OutcomeCounts counts =
      internal::count_outcomes(outcomes, static_cast<std::int64_t>(keys.size()));
  if (!in_flight) {
    count(counts);
    return;
  }
  record->new_rows.insert(record->new_rows.end(), insertion.rows.begin(), insertion.rows.end());
  internal::add_counts(record->outcomes, counts);
  num_in_flight += static_cast<std::int64_t>(insertion.rows.size());
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
    internal::kernels().gather({rows.records(), config.dim, config.default_value, row_numbers,
                                outcomes, begin, end, values});
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
  t.find(keys, rows.data(), found);
  Insertion insertion;
  try {
    t.insert_missing(keys, rows.data(), found, RowState::kVisible, insertion);
  } catch (...) {
    t.undo(insertion);
    throw;
  }
  const std::unique_lock rows_lock(t.rows_mutex);
  const std::int64_t state_width = t.layout.state_width();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!has_row(found[i])) continue;
    const auto row = static_cast<std::uint32_t>(rows[i]);
    float* const record = t.rows.records().row(row);
    std::copy_n(values + static_cast<std::int64_t>(i) * t.config.dim, t.config.dim, record);
    if (state == nullptr) {
      t.initialize_state(&row, 1);
      continue;
    }
    const float* source = state + static_cast<std::int64_t>(i) * state_width;
    for (std::size_t f = 1; f < t.layout.fields.size(); ++f) {
      const RowField& field = t.layout.fields[f];
      std::copy_n(source, field.count, record + field.offset / 4);
      source += field.count;
    }
  }
  t.count(internal::count_outcomes(found, static_cast<std::int64_t>(keys.size())));
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

void Table::set_update_count(std::uint64_t count) {
  // Beyond it the next updates would count from 0 again.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  if (count > kMost) {
    throw std::invalid_argument(impl_->title() + ": update count " + std::to_string(count) +
                                " is out of range; pass at most " + std::to_string(kMost));
  }
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->update_count = count;
}

}  // namespace recsdk
