#include "recsdk/device_table.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include "backends/backend.h"
#include "bags/check_bags.h"
#include "device/device_rows.h"
#include "device/device_table_impl.h"
#include "kernels/optimizer_step.h"
#include "util/must.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::CurrentDevice;
using internal::SortedGradients;

namespace {

[[noreturn, gnu::cold]] void refuse(const std::string& name, const std::string& what) {
  throw std::invalid_argument("device table '" + name + "': " + what);
}

// Keys beyond either limit are refused. The device's own limit does not divide over groups: all its
// rows can be used.
std::shared_ptr<Index::Impl> make_index(const TableConfig& config, const DeviceOptions& options,
                                        RowMaker& maker) {
  const std::int64_t limit =
      std::min(config.max_rows.value_or(options.max_device_rows), options.max_device_rows);
  std::optional<std::int64_t> groups = config.eviction_groups;
  if (!groups && limit == options.max_device_rows) groups = 1;
  return std::make_shared<Index::Impl>(
      IndexConfig{config.name, config.hash_seed, limit, groups, config.owned_groups, config.on_full,
                  config.num_threads},
      "table '" + config.name + "'", std::shared_ptr<RowMaker>(std::shared_ptr<void>(), &maker));
}

void check_options(const TableConfig& config, const DeviceOptions& options) {
  // A row's number is 32 bits, and one more row is the default.
  constexpr std::int64_t kMostRows = (std::int64_t{1} << 32) - 2;
  if (config.eviction) refuse(config.name, "eviction needs rows in the engine; leave it out");
  if (config.admission) refuse(config.name, "admission needs rows in the engine; leave it out");
  if (config.default_row.kind != DefaultKind::kConstant)
    refuse(config.name, "default_row must be constant for rows on a device; leave it out");
  if (options.max_device_rows < 1 || options.max_device_rows > kMostRows) {
    refuse(config.name, internal::must("max_device_rows", "be 1 to " + std::to_string(kMostRows),
                                       options.max_device_rows));
  }
}

TableConfig validated(TableConfig config, const DeviceOptions& options) {
  check_options(config, options);
  config.optimizer.validate();
  config.initializer.validate();
  if (!internal::is_device_optimizer(config.optimizer)) {
    refuse(config.name,
           "the optimizer is not one of a device; pass SGD, Adagrad, rowwise Adagrad or Adam, "
           "without dampening, clipping, catching up and counts per row");
  }
  if (config.weight_dtype != DType::kFloat32)
    refuse(config.name, "weight_dtype is 16 bits wide; rows on a device are float32");
  if (config.on_nonfinite != NonFinite::kApply)
    refuse(config.name, "on_nonfinite is not kApply; a device applies gradients unseen");
  return config;
}

internal::UpdateStep update_step(const OptimizerConfig& config, const RowLayout& layout,
                                 std::uint64_t t) {
  const internal::OptimizerStep from =
      internal::make_optimizer_step(config, layout, NonFinite::kApply, t, 0.0);
  internal::UpdateStep step;
  step.kind = from.kind;
  step.learning_rate = from.learning_rate;
  step.eps = from.eps;
  step.beta1 = static_cast<float>(config.beta1);
  step.one_minus_beta1 = from.one_minus_beta1;
  step.beta2 = from.beta2;
  step.one_minus_beta2 = from.one_minus_beta2;
  step.inv_sqrt_bias2 = from.inv_sqrt_bias2;
  step.has_momentum = from.has_momentum;
  step.is_nesterov = from.is_nesterov;
  step.momentum = from.momentum;
  step.l2 = from.l2;
  step.decay_factor = from.decay_factor;
  return step;
}

}  // namespace

std::vector<std::string> backends() {
  return {internal::backend_names().begin(), internal::backend_names().end()};
}

void require_backend(const std::string& backend) { internal::open_device(backend, 0); }

DeviceTable::Impl::Impl(TableConfig table_config, DeviceOptions device_options)
    : config(validated(std::move(table_config), device_options)),
      options(std::move(device_options)),
      layout(RowLayout::make(config.dim, config.optimizer)),
      table_hash(recsdk::table_hash(config.name)),
      keys(IndexAccess::make(make_index(config, options, *this))),
      index(IndexAccess::impl(keys)),
      rows(std::make_unique<internal::DeviceRows>(options, layout, config.default_row.value)),
      learning_rate(config.optimizer.learning_rate) {}

// Without the device's context nothing can be freed, so a failure is tried once more.
DeviceTable::Impl::~Impl() {
  // A lease may outlive the table and ends what it began, but makes no row.
  for (int attempt = 0; attempt < 2 && rows != nullptr; ++attempt) {
    try {
      const std::shared_ptr<internal::Device> device = rows->share_device();
      const CurrentDevice current(*device);
      rows.reset();
    } catch (const Error&) {
      if (attempt == 1) break;
    }
  }
}

// The limit of the index counts keys; rows that leases keep back are taken too.
void DeviceTable::Impl::require_room() const {
  if (index.numbers.end() <= options.max_device_rows) return;
  throw Error(ErrorCode::kCapacity,
              index.title +
                  ": leases keep rows of erased keys back, and the device has no others; "
                  "release leases before inserting");
}

void DeviceTable::Impl::make(const NewRows& added) {
  require_room();
  constexpr std::size_t kPiece = 8192;  // rows whose values the host holds at a time
  const std::span<const std::uint32_t> row_numbers = added.rows();
  std::vector<Key> new_keys;
  std::vector<float> weights;
  for (std::size_t begin = 0; begin < row_numbers.size(); begin += kPiece) {
    const auto piece = row_numbers.subspan(begin, std::min(kPiece, row_numbers.size() - begin));
    new_keys.resize(piece.size());
    added.copy_keys(static_cast<std::int64_t>(begin), new_keys);
    weights.resize(piece.size() * static_cast<std::size_t>(config.dim));
    initial_weights(config.initializer, config.seed, table_hash, config.dim, new_keys,
                    weights.data(), index.max_threads());
    const std::vector<RowNumber> numbers(piece.begin(), piece.end());
    const std::unique_lock lock(rows_mutex);
    const CurrentDevice current(rows->device());
    rows->write(numbers, weights.data(), nullptr);
  }
}

std::vector<RowNumber> DeviceTable::Impl::or_default(std::span<const RowNumber> row_numbers,
                                                     std::span<const Outcome> outcomes) const {
  std::vector<RowNumber> numbers(row_numbers.begin(), row_numbers.end());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (!has_row(outcomes[i])) numbers[i] = rows->default_row();
  }
  return numbers;
}

void DeviceTable::Impl::check_mapped(std::span<const RowNumber> row_numbers,
                                     std::span<const Outcome> outcomes, const float* memory) const {
  index.check_sizes(row_numbers.size(), outcomes.size());
  internal::check_bags({row_numbers, outcomes, {}, {}, Pooling::kSum}, index.numbers.end(),
                       [this] { return index.title; });
  const bool is_aligned =
      reinterpret_cast<std::uintptr_t>(memory) % internal::kDeviceAlignment == 0;
  if (!row_numbers.empty() && (memory == nullptr || !is_aligned)) {
    refuse(config.name,
           "the array in device memory is null or not 64-byte aligned; pass one that "
           "begins at a multiple of 64");
  }
}

internal::UpdateStep DeviceTable::Impl::next_step() const {
  OptimizerConfig optimizer = config.optimizer;
  optimizer.learning_rate = learning_rate.load();
  return update_step(optimizer, layout, update_count + 1);
}

DeviceTable::DeviceTable(TableConfig config, DeviceOptions options)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(options))) {}
DeviceTable::~DeviceTable() = default;
DeviceTable::DeviceTable(DeviceTable&&) noexcept = default;
DeviceTable& DeviceTable::operator=(DeviceTable&&) noexcept = default;

const TableConfig& DeviceTable::config() const noexcept { return impl_->config; }
const DeviceOptions& DeviceTable::options() const noexcept { return impl_->options; }
const RowLayout& DeviceTable::layout() const noexcept { return impl_->layout; }

Lease DeviceTable::lease(std::optional<std::int64_t> step) { return impl_->keys.lease(step); }

void DeviceTable::map(std::span<const Key> keys, std::span<RowNumber> rows,
                      std::span<Outcome> outcomes, const MapOptions& options) {
  impl_->keys.map(keys, rows, outcomes, options);
}

void DeviceTable::gather(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                         float* out) {
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->check_mapped(rows, outcomes, out);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->gather(impl_->or_default(rows, outcomes), out);
}

void DeviceTable::update(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                         const float* gradients) {
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->check_mapped(rows, outcomes, gradients);
  // Without offsets each key is a bag, so an item's source is the key's place.
  const GradBlock block{{rows, outcomes, {}, {}, Pooling::kSum}, nullptr, 0, nullptr};
  const SortedGradients sorted =
      internal::sort_gradients({&block, 1}, impl_->index.numbers.end(), impl_->index.max_threads());
  const internal::RunSum sum = internal::plan_run_sum(sorted);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->update(impl_->next_step(), sum, static_cast<std::int64_t>(rows.size()), gradients);
  ++impl_->update_count;
}

float DeviceTable::learning_rate() const { return impl_->learning_rate.load(); }

void DeviceTable::set_learning_rate(float learning_rate) {
  OptimizerConfig changed = impl_->config.optimizer;
  changed.learning_rate = learning_rate;
  changed.validate();
  impl_->learning_rate.store(learning_rate);
}

std::uint64_t DeviceTable::update_count() const {
  const std::shared_lock lock(impl_->rows_mutex);
  return impl_->update_count;
}

void DeviceTable::set_update_count(std::uint64_t count) {
  internal::check_update_count(count, impl_->index.title);
  const std::unique_lock lock(impl_->rows_mutex);
  impl_->update_count = count;
}

void DeviceTable::erase(std::span<const Key> keys, std::span<Outcome> outcomes) {
  impl_->keys.erase(keys, outcomes);
}
void DeviceTable::clear() { impl_->keys.clear(); }
std::int64_t DeviceTable::size() const { return impl_->keys.size(); }

DeviceTableStats DeviceTable::stats() const {
  const IndexStats from = impl_->keys.stats();
  DeviceTableStats stats;
  stats.num_rows = from.num_rows;
  stats.num_rows_in_flight = from.num_rows_in_flight;
  std::copy(std::begin(from.outcomes), std::end(from.outcomes), stats.outcomes);
  stats.erased = from.erased;
  stats.host_bytes = from.index_bytes + from.metadata_bytes;
  const std::unique_lock lock(impl_->rows_mutex);
  stats.updates = impl_->update_count;
  stats.pinned_bytes = impl_->rows->pinned_bytes();
  stats.device_bytes = impl_->rows->device_bytes();
  return stats;
}

void DeviceTable::synchronize() const {
  const std::unique_lock lock(impl_->rows_mutex);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->synchronize();
}

void* DeviceTable::stream() const noexcept { return impl_->rows->native_stream(); }

void DeviceTable::check_invariants() const {
  impl_->keys.check_invariants();
  const std::shared_lock lock(impl_->index.mutex);
  if (impl_->index.numbers.end() > impl_->options.max_device_rows) {
    throw Error(ErrorCode::kInternal, "device table '" + impl_->config.name +
                                          "': invariant broken: a row lies beyond max_device_rows");
  }
}

}  // namespace recsdk
