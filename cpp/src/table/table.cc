// Construction, and the calls that address rows by key.
#include "recsdk/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/optimizer_step.h"
#include "rows/file_fields.h"
#include "rows/row_values.h"
#include "table/default_reader.h"
#include "table/table_impl.h"
#include "util/hash.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::CallArray;
using internal::Found;
using internal::Insertion;
using internal::RowAddresses;
using internal::rows_of;
using internal::RowState;

namespace {

constexpr std::int64_t kRowGrain = 1024;  // rows a piece of a parallel copy or initialization

TableConfig validated(TableConfig config) {
  const std::string title = "table '" + config.name + "': ";
  if (config.name.empty()) throw std::invalid_argument("table: name must not be empty, got ''");
  if (config.rounding > Rounding::kNearest) {
    throw std::invalid_argument(title +
                                internal::must("rounding", "be one of Rounding", config.rounding));
  }
  if (config.on_nonfinite > NonFinite::kSkip) {
    throw std::invalid_argument(
        title + internal::must("on_nonfinite", "be one of NonFinite", config.on_nonfinite));
  }
  config.optimizer.validate();
  config.initializer.validate();
  internal::kernels();  // a wrong RECSDK_ISA fails here rather than half-way through a call
  return config;
}

// Its rows' maker is the table, which lives as long as anybody inserts.
std::shared_ptr<Index::Impl> make_index(const TableConfig& config, RowMaker& maker) {
  IndexConfig of_index{
      config.name,         config.hash_seed, config.max_rows,    config.eviction_groups,
      config.owned_groups, config.on_full,   config.num_threads, config.eviction,
      config.admission,    std::nullopt,     config.default_row};
  if (of_index.admission) of_index.admission->salt = admission_salt(config.seed, config.name);
  auto index =
      std::make_shared<Index::Impl>(std::move(of_index), "table '" + config.name + "'",
                                    std::shared_ptr<RowMaker>(std::shared_ptr<void>(), &maker));
  index->is_of_table = true;
  if (config.eviction && config.eviction->order == EvictOrder::kLowNorm)
    index->unmeasured.emplace();
  return index;
}

}  // namespace

Table::Impl::Impl(TableConfig table_config)
    : config(validated(std::move(table_config))),
      layout(RowLayout::make(config.dim, config.optimizer, config.weight_dtype)),
      table_hash(recsdk::table_hash(config.name)),
      keys(IndexAccess::make(make_index(config, *this))),
      index(IndexAccess::impl(keys)),
      rows(layout),
      shared(make_shared()),
      learning_rate(config.optimizer.learning_rate),
      cut_memory(index.hash_seed, internal::CutState::copy_bytes(layout)) {
  if (begins_with_shared()) index.ends_at_once = true;
}

// A cut may still need what lies in rows that are used again.
void Table::Impl::prepare(RowNumber end, std::span<const std::uint32_t> reused) {
  rows.grow(end);
  let_wait(end);
  if (open_cut != nullptr) open_cut->preserve_rows(reused, copy_waits);
}

// Threads write pieces side by side, so fresh pages are backed first, each by one thread.
void Table::Impl::make(const NewRows& added) {
  constexpr auto kManyBytes = 2 * static_cast<std::int64_t>(internal::kHugePage);
  const RowNumber end = index.numbers.end();
  if (added.size() * layout.row_bytes() >= kManyBytes)
    rows.populate_pages(std::max<RowNumber>(end - added.size(), 0), end, index.max_threads());
  if (begins_with_shared()) {
    make_from_shared(added);
  } else if (config.initializer.kind == InitializerKind::kCustom) {
    initialize_custom(added);
  } else {
    internal::parallel_for(
        added.size(), kRowGrain, index.max_threads(),
        [&](std::int64_t begin, std::int64_t piece_end) { initialize(added, begin, piece_end); });
  }
  populate_ahead(added.size());
}

void Table::Impl::initialize(const NewRows& added, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kPiece = 256;
  std::array<Key, kPiece> piece;
  const std::uint32_t* const numbers = added.rows().data();
  for (; begin < end; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, end - begin);
    added.copy_keys(begin, std::span(piece).first(static_cast<std::size_t>(count)));
    internal::kernels().initialize({&config.initializer, config.seed, table_hash, config.dim,
                                    piece.data(), count, rows.records(), config.weight_dtype,
                                    numbers + begin, nullptr});
    initialize_state(added, begin, begin + count);
  }
}

void Table::Impl::initialize_custom(const NewRows& added) {
  std::vector<Key> new_keys(added.rows().size());
  added.copy_keys(0, new_keys);
  std::vector<float> weights(new_keys.size() * static_cast<std::size_t>(config.dim));
  config.initializer.callback(new_keys, weights.data());
  internal::parallel_for(
      added.size(), kRowGrain, index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i)
          internal::write_weights(layout, rows.records(), added.rows()[static_cast<std::size_t>(i)],
                                  weights.data() + i * config.dim);
        initialize_state(added, begin, end);
      });
}

void Table::Impl::check(std::span<const Key> without_row) {
  std::vector<float> weights(without_row.size() * static_cast<std::size_t>(config.dim));
  config.initializer.callback(without_row, weights.data());
}

void Table::Impl::initialize_state(const NewRows& added, std::int64_t begin, std::int64_t end) {
  if (layout.fields.size() < 2) return;
  for (; begin < end; ++begin)
    internal::reset_state(layout, rows.records(), added.rows()[static_cast<std::size_t>(begin)]);
}

std::optional<internal::SharedStore> Table::Impl::make_shared() const {
  if (config.default_row.kind != DefaultKind::kSharedRows) return std::nullopt;
  std::optional<internal::SharedStore> made(std::in_place, layout, config.default_row.num_rows);
  const SharedRows values = made->values();
  std::vector<float> weights(values.weights.size());
  initial_weights(config.initializer, config.seed, table_hash, config.dim, values.keys,
                  weights.data(), config.num_threads);
  made->write(values.keys, weights.data(), nullptr);
  return made;
}

// As Index::Impl::populate_ahead, for records.
void Table::Impl::populate_ahead(std::int64_t num_new) noexcept {
  std::int64_t num_pages =
      1 + num_new * layout.row_bytes() / static_cast<std::int64_t>(internal::kHugePage);
  while (num_pages-- > 0 && rows.populate_ahead(index.numbers.end())) {
  }
}

void Table::Impl::gather(const Found& found, float* values) const {
  const internal::DefaultReader reader(*this, found.rows, found.outcomes);
  internal::parallel_for(static_cast<std::int64_t>(found.rows.size()), kRowGrain,
                         index.max_threads(), [&](std::int64_t begin, std::int64_t end) {
                           internal::kernels().gather({rows.records(), config.weight_dtype,
                                                       config.dim, reader.defaults(), reader.rows(),
                                                       found.outcomes.data(), begin, end, values});
                         });
}

Table::Table(TableConfig config) : impl_(std::make_shared<Impl>(std::move(config))) {}
Table::~Table() = default;
Table::Table(Table&&) noexcept = default;
Table& Table::operator=(Table&&) noexcept = default;

const TableConfig& Table::config() const noexcept { return impl_->config; }
const RowLayout& Table::layout() const noexcept { return impl_->layout; }

Index& Table::index() noexcept { return impl_->keys; }
const Index& Table::index() const noexcept { return impl_->keys; }

Lease Table::lease(std::optional<std::int64_t> step) { return impl_->keys.lease(step); }

void Table::map(std::span<const Key> keys, std::span<RowNumber> rows, std::span<Outcome> outcomes,
                const MapOptions& options) {
  impl_->keys.map(keys, rows, outcomes, options);
}

void Table::lookup(std::span<const Key> keys, float* values, std::span<Outcome> outcomes) const {
  const CallArray written = rows_of("values", values, keys.size(), impl_->config.dim);
  impl_->index.check_outcomes(keys, outcomes, {written});
  impl_->index.check_apart(keys, written, outcomes, {});
  Found found(keys.size(), outcomes);
  const std::shared_lock lock(impl_->index.mutex);
  impl_->index.find_visible(keys, found.rows.data(), found.outcomes.data());
  const std::shared_lock rows_lock(impl_->rows_mutex);
  impl_->gather(found, values);
  impl_->index.count(found.counts());
}

void Table::find_or_insert(std::span<const Key> keys, float* values, std::span<Outcome> outcomes,
                           const Lease* lease, const KeyData& data) {
  const CallArray written = rows_of("values", values, keys.size(), impl_->config.dim);
  impl_->index.check_outcomes(keys, outcomes, {written});
  impl_->index.check_apart(keys, written, outcomes, data);
  impl_->index.check_data(keys.size(), data, true);
  const auto record = impl_->index.check_lease(lease);
  Found found(keys.size(), outcomes);
  const std::unique_lock lock(impl_->index.mutex);
  const auto map = [&](const internal::Then& then) {
    impl_->index.map_inserting(keys, found.rows.data(), found.outcomes.data(), record.get(), data,
                               then);
  };
  const auto gather = [&](const Found& read) {
    const std::shared_lock rows_lock(impl_->rows_mutex);
    impl_->gather(read, values);
  };
  if (impl_->config.default_row.kind == DefaultKind::kInitialRow) {
    // Making what is read may throw, as a custom initializer may: so it comes before what changes.
    return map([&] {
      Found read(keys.size(), found.outcomes);
      read.rows = found.rows;
      impl_->index.point_to_defaults(keys, read.rows.data(), read.outcomes.data());
      gather(read);
    });
  }
  map({});
  impl_->begin_rows({found.rows, found.outcomes, {}, {}, Pooling::kSum});
  gather(found);
}

void Table::upsert(std::span<const Key> keys, const float* values, const float* state,
                   std::span<Outcome> outcomes, const KeyData& data) {
  Impl& t = *impl_;
  t.index.check_outcomes(keys, outcomes,
                         {rows_of("values", values, keys.size(), t.config.dim),
                          rows_of("state", state, keys.size(), t.layout.state_width()),
                          {"times", data.times},
                          {"scores", data.scores},
                          {"counts", data.counts},
                          {"clicks", data.clicks}});
  t.index.check_data(keys.size(), data, true, /*admits_all=*/true);
  Found found(keys.size(), outcomes);
  const std::unique_lock lock(t.index.mutex);
  t.index.require_no_steps("upsert");
  Insertion insertion;
  insertion.admits_all = true;
  t.index.begin_insertion(keys.size(), insertion, nullptr, data);
  try {
    t.index.find_or_insert(keys, found.rows.data(), found.outcomes.data(), RowState::kVisible,
                           insertion);
    if (t.open_cut != nullptr) t.preserve_found(found);
    t.index.prepare_eviction(keys, found.outcomes.data(), insertion, nullptr);
  } catch (...) {
    t.index.undo(insertion);
    throw;
  }
  t.index.settle(insertion);
  if (t.index.evictor) {
    t.index.settle_eviction(keys, found.rows.data(), found.outcomes.data(), insertion, nullptr);
  }
  if (t.index.admission) t.index.settle_admission(found.outcomes.data(), insertion, nullptr);
  if (t.index.has_clock()) t.index.advance_clock(insertion, nullptr);
  t.index.note_visible(insertion.rows);
  const std::unique_lock rows_lock(t.rows_mutex);
  t.write(found, values, state);
  t.index.count(found.counts());
}

void Table::Impl::write(const Found& found, const float* values, const float* state) {
  const std::int64_t state_width = layout.state_width();
  const RowAddresses records = rows.records();
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    if (!has_row(found.outcomes[i])) continue;
    const RowNumber row = found.rows[i];
    if (begins_with_shared()) waiting.take(row);  // of a call that was taken back
    const auto position = static_cast<std::int64_t>(i);
    index.note_weights(row);
    internal::write_weights(layout, records, row, values + position * config.dim);
    if (state == nullptr) {
      internal::reset_state(layout, records, row);
    } else {
      internal::write_state(layout, records, row, state + position * state_width);
    }
  }
}

void Table::Impl::preserve_found(const Found& found) {
  std::vector<std::uint32_t> changing;
  changing.reserve(found.rows.size());
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    if (has_row(found.outcomes[i])) changing.push_back(static_cast<std::uint32_t>(found.rows[i]));
  }
  std::sort(changing.begin(), changing.end());
  changing.erase(std::unique(changing.begin(), changing.end()), changing.end());
  open_cut->preserve_rows(changing, copy_waits);
}

void Table::erase(std::span<const Key> keys, std::span<Outcome> outcomes) {
  impl_->keys.erase(keys, outcomes);
}

void Table::clear() { impl_->keys.clear(); }
std::int64_t Table::evict(std::int64_t max_rows) { return impl_->keys.evict(max_rows); }
void Table::set_time(std::int64_t time) { impl_->keys.set_time(time); }

SharedRows Table::shared_rows() const {
  const std::shared_lock lock(impl_->rows_mutex);
  return impl_->shared ? impl_->shared->values() : SharedRows{};
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
  internal::check_update_count(count, impl_->title());
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
    throw std::invalid_argument(title() + ": " +
                                internal::must("log_decay",
                                               config.optimizer.catch_up ? "be finite and 0 or less"
                                                                         : "be 0 without catch_up",
                                               value) +
                                "; pass what log_decay() gave of a table with the same optimizer");
  }
}

std::vector<FileField> Table::Impl::file_fields() const {
  std::vector<FileField> fields = internal::file_fields(layout);
  if (!index.evictor) return fields;
  for (const internal::MetaKind kind : index.evictor->meta().kinds())
    fields.push_back(internal::file_field(kind));
  return fields;
}

std::vector<std::size_t> Table::Impl::meta_bytes() const {
  std::vector<std::size_t> bytes;
  for (const internal::MetaKind kind : index.evictor->meta().kinds())
    bytes.push_back(static_cast<std::size_t>(internal::file_field(kind).row_bytes()));
  return bytes;
}

void Table::set_log_decay(double log_decay) {
  impl_->check_log_decay(log_decay);
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->log_decay = log_decay;
}

}  // namespace recsdk
