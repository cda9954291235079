#include "recsdk/device_table.h"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include "backends/backend.h"
#include "device/device_rows.h"
#include "device/device_table_impl.h"
#include "kernels/optimizer_step.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::CurrentDevice;
using internal::SortedGradients;

namespace {

constexpr std::int64_t kRowGrain = 1024;  // rows a piece of a parallel loop

[[noreturn, gnu::cold]] void refuse(const std::string& name, const std::string& what) {
  throw std::invalid_argument("device table '" + name + "': " + what);
}

// The table that keeps index, leases and row numbers; its own rows are as small as they can be.
TableConfig index_config(const TableConfig& config, const DeviceOptions& options) {
  TableConfig index;
  index.dim = 1;
  index.name = config.name;
  index.seed = config.seed;
  index.hash_seed = config.hash_seed;
  index.max_rows =
      std::min(config.max_rows.value_or(options.max_device_rows), options.max_device_rows);
  index.on_full = config.on_full;
  index.num_threads = config.num_threads;
  index.optimizer = OptimizerConfig::sgd(config.optimizer.learning_rate);
  return index;
}

void check_options(const TableConfig& config, const DeviceOptions& options) {
  // A row's number is 32 bits, and one more row is the default.
  constexpr std::int64_t kMostRows = (std::int64_t{1} << 32) - 2;
  if (options.max_device_rows < 1 || options.max_device_rows > kMostRows) {
    refuse(config.name, "max_device_rows is " + std::to_string(options.max_device_rows) +
                            "; pass 1 to " + std::to_string(kMostRows));
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
      index(index_config(config, options)),
      core(TableAccess::impl(index)),
      rows(std::make_unique<internal::DeviceRows>(options, layout, config.default_value)) {
  core.make_rows = [this](std::span<const std::uint32_t> row_numbers) { make_rows(row_numbers); };
}

// Without the device's context nothing can be freed; a second try, for there is no other way.
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

bool DeviceTable::Impl::overflows() const {
  return !config.max_rows || *config.max_rows > options.max_device_rows;
}

void DeviceTable::Impl::name_refusals(std::span<Outcome> outcomes) const {
  if (overflows())
    std::replace(outcomes.begin(), outcomes.end(), Outcome::kRefused, Outcome::kOverflowed);
}

// Runs under the index's lock. What it throws takes the insertion back.
void DeviceTable::Impl::make_rows(std::span<const std::uint32_t> row_numbers) {
  constexpr std::size_t kPiece = 8192;  // rows whose values the host holds at a time
  std::vector<float> weights;
  for (std::size_t begin = 0; begin < row_numbers.size(); begin += kPiece) {
    const auto piece = row_numbers.subspan(begin, std::min(kPiece, row_numbers.size() - begin));
    std::vector<Key> keys;
    keys.reserve(piece.size());
    for (const std::uint32_t row : piece) keys.push_back(core.rows.key(row));
    weights.resize(piece.size() * static_cast<std::size_t>(config.dim));
    initial_weights(keys, weights.data());
    const std::vector<RowNumber> numbers(piece.begin(), piece.end());
    const std::unique_lock lock(core.rows_mutex);
    const CurrentDevice current(rows->device());
    rows->write(numbers, weights.data(), nullptr);
  }
  if (then) then();
}

void DeviceTable::Impl::initial_weights(std::span<const Key> keys, float* weights) const {
  if (config.initializer.kind == InitializerKind::kCustom) {
    const internal::FairMutex::CallbackScope scope(core.index_mutex);
    config.initializer.callback(keys, weights);
    return;
  }
  internal::parallel_for(static_cast<std::int64_t>(keys.size()), kRowGrain, core.max_threads(),
                         [&](std::int64_t begin, std::int64_t end) {
                           internal::kernels().initialize({&config.initializer,
                                                           config.seed,
                                                           core.table_hash,
                                                           config.dim,
                                                           keys.data() + begin,
                                                           end - begin,
                                                           {},
                                                           DType::kFloat32,
                                                           nullptr,
                                                           weights + begin * config.dim});
                         });
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
  core.check_bags({row_numbers, outcomes, {}, {}, Pooling::kSum});
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
  optimizer.learning_rate = core.learning_rate.load();
  return update_step(optimizer, layout, core.update_count + 1);
}

DeviceTable::DeviceTable(TableConfig config, DeviceOptions options)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(options))) {}
DeviceTable::~DeviceTable() = default;
DeviceTable::DeviceTable(DeviceTable&&) noexcept = default;
DeviceTable& DeviceTable::operator=(DeviceTable&&) noexcept = default;

const TableConfig& DeviceTable::config() const noexcept { return impl_->config; }
const DeviceOptions& DeviceTable::options() const noexcept { return impl_->options; }
const RowLayout& DeviceTable::layout() const noexcept { return impl_->layout; }

Lease DeviceTable::lease(std::optional<std::int64_t> step) { return impl_->index.lease(step); }

void DeviceTable::map(std::span<const Key> keys, std::span<RowNumber> rows,
                      std::span<Outcome> outcomes, const MapOptions& options) {
  impl_->index.map(keys, rows, outcomes, options);
  impl_->name_refusals(outcomes);
}

void DeviceTable::gather(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                         float* out) {
  const std::unique_lock lock(impl_->core.rows_mutex);
  impl_->check_mapped(rows, outcomes, out);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->gather(impl_->or_default(rows, outcomes), out);
}

void DeviceTable::update(std::span<const RowNumber> rows, std::span<const Outcome> outcomes,
                         const float* gradients) {
  const std::unique_lock lock(impl_->core.rows_mutex);
  impl_->check_mapped(rows, outcomes, gradients);
  // Without offsets each key is a bag, so an item's source is the key's place.
  const GradBlock block{{rows, outcomes, {}, {}, Pooling::kSum}, nullptr, 0, nullptr};
  const SortedGradients sorted =
      internal::sort_gradients({&block, 1}, impl_->core.rows.end(), impl_->core.max_threads());
  const internal::RunSum sum = internal::plan_run_sum(sorted);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->update(impl_->next_step(), sum, static_cast<std::int64_t>(rows.size()), gradients);
  ++impl_->core.update_count;
}

float DeviceTable::learning_rate() const { return impl_->index.learning_rate(); }
void DeviceTable::set_learning_rate(float learning_rate) {
  impl_->index.set_learning_rate(learning_rate);
}
std::uint64_t DeviceTable::update_count() const { return impl_->index.update_count(); }
void DeviceTable::set_update_count(std::uint64_t count) { impl_->index.set_update_count(count); }

void DeviceTable::erase(std::span<const Key> keys, std::span<Outcome> outcomes) {
  impl_->index.erase(keys, outcomes);
}
void DeviceTable::clear() { impl_->index.clear(); }
std::int64_t DeviceTable::size() const { return impl_->index.size(); }

DeviceTableStats DeviceTable::stats() const {
  const TableStats from = impl_->index.stats();
  DeviceTableStats stats;
  stats.num_rows = from.num_rows;
  stats.num_rows_in_flight = from.num_rows_in_flight;
  std::copy(std::begin(from.outcomes), std::end(from.outcomes), stats.outcomes);
  if (impl_->overflows()) {
    std::swap(stats.outcomes[static_cast<int>(Outcome::kRefused)],
              stats.outcomes[static_cast<int>(Outcome::kOverflowed)]);
  }
  stats.erased = from.erased;
  stats.updates = from.updates;
  stats.host_bytes = from.index_bytes + from.row_bytes + from.metadata_bytes;
  const std::unique_lock lock(impl_->core.rows_mutex);
  stats.pinned_bytes = impl_->rows->pinned_bytes();
  stats.device_bytes = impl_->rows->device_bytes();
  return stats;
}

void DeviceTable::synchronize() const {
  const std::unique_lock lock(impl_->core.rows_mutex);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->synchronize();
}

void* DeviceTable::stream() const noexcept { return impl_->rows->native_stream(); }

void DeviceTable::check_invariants() const {
  impl_->index.check_invariants();
  const std::shared_lock lock(impl_->core.index_mutex);
  if (impl_->core.rows.end() > impl_->options.max_device_rows) {
    throw Error(ErrorCode::kInternal, "device table '" + impl_->config.name +
                                          "': invariant broken: a row lies beyond max_device_rows");
  }
}

}  // namespace recsdk
