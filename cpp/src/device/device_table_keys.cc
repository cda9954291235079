// The calls of a device table that take and give arrays of the host, by key.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "device/device_table_impl.h"
#include "recsdk/device_table.h"
#include "util/thread_pool.h"

namespace recsdk {

using internal::CallArray;
using internal::CurrentDevice;
using internal::Found;
using internal::Insertion;
using internal::rows_of;
using internal::RowState;
using internal::SortedGradients;

namespace {

constexpr std::int64_t kRowGrain = 256;  // rows a piece of a parallel sum

// One gradient a row, added in the order of the keys.
struct RowGradients {
  std::vector<RowNumber> rows;
  std::vector<float> gradients;
};

RowGradients add_by_row(const SortedGradients& sorted, std::int64_t dim, int max_threads) {
  RowGradients sums;
  std::vector<std::int64_t> begins;
  const std::int64_t num_items = sorted.items.size();
  for (std::int64_t i = 0; i < num_items; ++i) {
    if (i != 0 && sorted.items[i].row == sorted.items[i - 1].row) continue;
    begins.push_back(i);
    sums.rows.push_back(sorted.items[i].row);
  }
  begins.push_back(num_items);
  sums.gradients.resize(sums.rows.size() * static_cast<std::size_t>(dim));
  internal::parallel_for(static_cast<std::int64_t>(sums.rows.size()), kRowGrain, max_threads,
                         [&](std::int64_t first, std::int64_t last) {
                           for (std::int64_t r = first; r < last; ++r) {
                             float* const sum = sums.gradients.data() + r * dim;
                             std::int64_t i = begins[static_cast<std::size_t>(r)];
                             std::copy_n(sorted.sources[sorted.items[i].source].grad, dim, sum);
                             for (++i; i < begins[static_cast<std::size_t>(r) + 1]; ++i) {
                               const float* const grad =
                                   sorted.sources[sorted.items[i].source].grad;
                               for (std::int64_t c = 0; c < dim; ++c) sum[c] += grad[c];
                             }
                           }
                         });
  return sums;
}

// What upsert writes: of equal rows the last.
struct LastValues {
  std::vector<RowNumber> rows;
  std::vector<float> weights;
  std::vector<float> state;
};

LastValues last_values(const Found& found, const float* values, std::int64_t dim,
                       const float* state, std::int64_t state_width) {
  std::unordered_map<RowNumber, std::size_t> last;
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    if (has_row(found.outcomes[i])) last[found.rows[i]] = i;
  }
  LastValues kept;
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    if (!has_row(found.outcomes[i]) || last[found.rows[i]] != i) continue;
    kept.rows.push_back(found.rows[i]);
    const auto place = static_cast<std::int64_t>(i);
    const float* const row = values + place * dim;
    kept.weights.insert(kept.weights.end(), row, row + dim);
    if (state == nullptr) continue;
    const float* const row_state = state + place * state_width;
    kept.state.insert(kept.state.end(), row_state, row_state + state_width);
  }
  return kept;
}

}  // namespace

void DeviceTable::Impl::read(const Found& found, float* values, float* state) {
  const CurrentDevice current(rows->device());
  rows->read(or_default(found.rows, found.outcomes), values, state);
}

void DeviceTable::lookup(std::span<const Key> keys, float* values,
                         std::span<Outcome> outcomes) const {
  read_rows(keys, values, nullptr, outcomes);
}

void DeviceTable::read_rows(std::span<const Key> keys, float* values, float* state,
                            std::span<Outcome> outcomes) const {
  Index::Impl& index = impl_->index;
  const CallArray written = rows_of("values", values, keys.size(), impl_->config.dim);
  const CallArray of_state = rows_of("state", state, keys.size(), impl_->layout.state_width());
  index.check_outcomes(keys, outcomes, {written, of_state});
  index.check_apart(keys, written, outcomes, {});
  internal::require_apart(of_state, {{"keys", keys}, written}, [&] { return index.title; });
  Found found(keys.size(), outcomes);
  const std::shared_lock lock(index.mutex);
  index.find_visible(keys, found.rows.data(), found.outcomes.data());
  const std::unique_lock rows_lock(impl_->rows_mutex);
  impl_->read(found, values, state);
  index.count(found.counts());
}

void DeviceTable::find_or_insert(std::span<const Key> keys, float* values,
                                 std::span<Outcome> outcomes, const Lease* lease) {
  Index::Impl& index = impl_->index;
  const CallArray written = rows_of("values", values, keys.size(), impl_->config.dim);
  index.check_outcomes(keys, outcomes, {written});
  index.check_apart(keys, written, outcomes, {});
  const std::shared_ptr<internal::LeaseRecord> record = index.check_lease(lease);
  Found found(keys.size(), outcomes);
  const std::unique_lock lock(index.mutex);
  // Within the insertion, so that keys leave again if their rows cannot be read.
  index.map_inserting(keys, found.rows.data(), found.outcomes.data(), record.get(), {}, [&] {
    const std::unique_lock rows_lock(impl_->rows_mutex);
    impl_->read(found, values, nullptr);
  });
}

void DeviceTable::upsert(std::span<const Key> keys, const float* values, const float* state,
                         std::span<Outcome> outcomes) {
  Index::Impl& index = impl_->index;
  index.check_outcomes(keys, outcomes,
                       {rows_of("values", values, keys.size(), impl_->config.dim),
                        rows_of("state", state, keys.size(), impl_->layout.state_width())});
  Found found(keys.size(), outcomes);
  const std::unique_lock lock(index.mutex);
  index.require_no_steps("upsert");
  Insertion insertion;
  try {
    index.find_or_insert(keys, found.rows.data(), found.outcomes.data(), RowState::kVisible,
                         insertion);
    impl_->require_room();
    const LastValues kept =
        last_values(found, values, impl_->config.dim, state, impl_->layout.state_width());
    const std::unique_lock rows_lock(impl_->rows_mutex);
    const CurrentDevice current(impl_->rows->device());
    impl_->rows->replace(kept.rows, kept.weights.data(),
                         state == nullptr ? nullptr : kept.state.data());
  } catch (...) {
    index.undo(insertion);
    throw;
  }
  index.settle(insertion);
  index.count(found.counts());
}

void DeviceTable::apply_gradients(std::span<const Key> keys, const float* gradients,
                                  std::span<Outcome> outcomes) {
  Index::Impl& index = impl_->index;
  index.check_outcomes(keys, outcomes,
                       {rows_of("gradients", gradients, keys.size(), impl_->config.dim)});
  Found found(keys.size(), outcomes);
  const std::shared_lock lock(index.mutex);
  index.find_visible(keys, found.rows.data(), found.outcomes.data());
  const std::int64_t dim = impl_->config.dim;
  const GradBlock block{
      {found.rows, found.outcomes, {}, {}, Pooling::kSum}, gradients, dim, nullptr};
  const SortedGradients sorted =
      internal::sort_gradients({&block, 1}, index.numbers.end(), index.max_threads());
  const RowGradients sums = add_by_row(sorted, dim, index.max_threads());
  {
    const std::unique_lock rows_lock(impl_->rows_mutex);
    const CurrentDevice current(impl_->rows->device());
    impl_->rows->update(impl_->next_step(), sums.rows, sums.gradients.data());
    ++impl_->update_count;
  }
  index.count(found.counts());
}

std::int64_t DeviceTable::export_rows(RowNumber& begin, const ExportBuffer& buffer) const {
  if (begin < 0 || buffer.capacity < 1 || buffer.keys == nullptr) {
    throw std::invalid_argument(
        impl_->index.title +
        ": export needs a row number of 0 or more, a capacity of 1 or more and room for keys");
  }
  const Index::Impl& index = impl_->index;
  const std::shared_lock lock(index.mutex);
  std::vector<RowNumber> rows;
  RowNumber row = begin;
  for (; row < index.numbers.end() && static_cast<std::int64_t>(rows.size()) < buffer.capacity;
       ++row) {
    if (index.numbers.state(row) != RowState::kVisible) continue;
    buffer.keys[rows.size()] = index.numbers.key(row);
    rows.push_back(row);
  }
  const std::unique_lock rows_lock(impl_->rows_mutex);
  const CurrentDevice current(impl_->rows->device());
  impl_->rows->read(rows, buffer.weights, buffer.state);
  begin = row;
  return static_cast<std::int64_t>(rows.size());
}

}  // namespace recsdk
