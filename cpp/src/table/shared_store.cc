#include "table/shared_store.h"

#include <algorithm>

#include "rows/row_values.h"

namespace recsdk::internal {
namespace {

constexpr std::int64_t kKeyBytes = std::int64_t{1} << 20;  // of a slab: as many as there can be

}  // namespace

SharedStore::SharedStore(const RowLayout& layout, std::int64_t num_rows)
    : layout_(&layout), num_rows_(num_rows), rows_(layout), keys_(sizeof(Key), 0, kKeyBytes) {
  rows_.grow(num_rows);
  keys_.grow(num_rows);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    *keys_.at<Key>(row) = shared_row_key(row, num_rows);
    reset_state(layout, records(), row);
  }
}

SharedRows SharedStore::values() const {
  const auto n = static_cast<std::size_t>(num_rows_);
  const std::int64_t width = layout_->state_width();
  SharedRows found;
  found.keys.resize(n);
  found.weights.resize(n * static_cast<std::size_t>(layout_->dim));
  found.state.resize(n * static_cast<std::size_t>(width));
  for (std::int64_t row = 0; row < num_rows_; ++row) {
    found.keys[static_cast<std::size_t>(row)] = key(row);
    read_weights(*layout_, records(), row, found.weights.data() + row * layout_->dim);
    read_state(*layout_, records(), row, found.state.data() + row * width);
  }
  return found;
}

bool SharedStore::write(std::span<const Key> keys, const float* weights, const float* state) const {
  const bool are_own = std::all_of(keys.begin(), keys.end(), [this](Key each) {
    return key(shared_row(each, num_rows_)) == each;
  });
  if (!are_own) return false;
  const std::int64_t width = layout_->state_width();
  for (const Key each : keys) {
    const std::int64_t row = shared_row(each, num_rows_);
    write_weights(*layout_, records(), row, weights);
    weights += layout_->dim;
    if (state == nullptr) {
      reset_state(*layout_, records(), row);
    } else {
      write_state(*layout_, records(), row, state);
      state += width;
    }
  }
  return true;
}

}  // namespace recsdk::internal
