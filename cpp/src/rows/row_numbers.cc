#include "rows/row_numbers.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "recsdk/error.h"
#include "util/prefetch.h"

namespace recsdk::internal {

void RowNumbers::grow(std::int64_t count) {
  keys_.grow(count);
  visible_.grow(count);
  in_flight_.grow(count);
  if (!meta_) return;
  meta_->grow(count);
  leaving_.grow(count);
}

void RowNumbers::prepare_allocate(std::int64_t count) {
  const std::int64_t needed =
      end_ + std::max<std::int64_t>(count - static_cast<std::int64_t>(free_.size()), 0);
  if (needed > num_prepared_) {
    if (needed > kMaxRows) {
      throw Error(ErrorCode::kCapacity, "an index or table holds at most 2^32 - 1 rows, and " +
                                            std::to_string(needed) +
                                            " are needed; shard it over more ranks");
    }
    grow(needed);
    num_prepared_ = needed;
  }
}

void RowNumbers::prepare_free(std::int64_t count) {
  const auto needed = static_cast<std::size_t>(count) + free_.size() + kept_back_.size();
  // Doubling, as push_back would.
  if (free_.capacity() < needed) free_.reserve(std::max(needed, 2 * free_.capacity()));
  if (kept_back_.capacity() < needed)
    kept_back_.reserve(std::max(needed, 2 * kept_back_.capacity()));
}

std::uint32_t RowNumbers::allocate(Key key, RowState state) noexcept {
  std::uint32_t row = 0;
  if (free_.empty()) {
    // An atomic addition would wait for all stores before it, which go to random lines.
    const RowNumber next = end();
    row = static_cast<std::uint32_t>(next);
    end_.store(next + 1, std::memory_order_relaxed);
  } else {
    row = free_.back();
    free_.pop_back();
  }
  *keys_.at<Key>(row) = key;
  set_state(row, state);
  return row;
}

bool RowNumbers::prepare_append(std::int64_t count) {
  const std::int64_t needed = end_ + count;
  if (!free_.empty() || needed > kMaxRows) return false;
  grow(needed);
  return true;
}

void RowNumbers::append(std::span<const Key> keys, const Outcome* outcomes,
                        RowState state) noexcept {
  constexpr std::size_t kBlock = 64;
  Key block[kBlock];
  RowNumber next = end();
  for (std::size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const std::size_t length = std::min(kBlock, keys.size() - begin);
    std::size_t count = 0;
    for (std::size_t i = begin; i < begin + length; ++i) {
      block[count] = keys[i];
      count += static_cast<std::size_t>(outcomes[i] == Outcome::kInserted);
    }
    for (std::size_t j = 0; j < count; ++j, ++next) *keys_.at<Key>(next) = block[j];
  }
  if (state == RowState::kVisible) visible_.set_all_alone(end(), next);
  if (state == RowState::kInFlight) in_flight_.set_all_alone(end(), next);
  end_.store(next, std::memory_order_relaxed);
  num_prepared_ = std::max(num_prepared_, next);
}

void RowNumbers::allocate_all(std::span<const std::uint32_t> rows, std::span<const Key> keys,
                              const Outcome* outcomes, RowState state) noexcept {
  std::size_t j = 0;
  for (std::size_t i = 0; j < rows.size(); ++i) {
    if (outcomes[i] != Outcome::kInserted) continue;
    if (j + kItemsAhead < rows.size()) prefetch_key(rows[j + kItemsAhead]);
    set_key(rows[j++], keys[i]);
  }
  allocate_all(rows, state);
}

void RowNumbers::allocate_all(std::span<const std::uint32_t> rows, RowState state) noexcept {
  const std::size_t num_reused = std::min(rows.size(), free_.size());
  for (std::size_t j = 0; j < num_reused; ++j) {
    if (j + kItemsAhead < num_reused) prefetch_state(rows[j + kItemsAhead]);
    set_state(rows[j], state);
  }
  free_.resize(free_.size() - num_reused);
  const RowNumber next = end() + static_cast<RowNumber>(rows.size() - num_reused);
  if (state == RowState::kVisible) visible_.set_all_alone(end(), next);
  if (state == RowState::kInFlight) in_flight_.set_all_alone(end(), next);
  end_.store(next, std::memory_order_relaxed);
}

void RowNumbers::undo_allocate(std::uint32_t row, RowNumber old_end) noexcept {
  set_state(row, RowState::kFree);
  if (row >= old_end) {
    end_.store(end() - 1, std::memory_order_relaxed);
  } else {
    free_.push_back(row);  // its place is still there
  }
}

void RowNumbers::free(std::uint32_t row, std::uint64_t epoch) noexcept {
  set_state(row, RowState::kFree);
  kept_back_.push_back({epoch, row});
}

void RowNumbers::release_before(std::uint64_t epoch) {
  const auto end = std::find_if(kept_back_.begin(), kept_back_.end(),
                                [epoch](const KeptBack& k) { return k.epoch >= epoch; });
  for (auto it = kept_back_.begin(); it != end; ++it) free_.push_back(it->row);
  kept_back_.erase(kept_back_.begin(), end);
}

void RowNumbers::swap(RowNumbers& other) noexcept {
  std::swap(keys_, other.keys_);
  std::swap(visible_, other.visible_);
  std::swap(in_flight_, other.in_flight_);
  std::swap(leaving_, other.leaving_);
  std::swap(meta_, other.meta_);
  free_.swap(other.free_);
  kept_back_.swap(other.kept_back_);
  std::swap(num_prepared_, other.num_prepared_);
  end_ = other.end_.exchange(end_);
}

void RowNumbers::reserve(std::int64_t count) {
  prepare_allocate(
      std::max<std::int64_t>(count - end_ + static_cast<std::int64_t>(free_.size()), 0));
  keys_.populate(end_, num_prepared_);
  if (meta_) meta_->populate(end_, num_prepared_);
  visible_.populate(end_, num_prepared_);
}

std::int64_t RowNumbers::metadata_bytes() const noexcept {
  constexpr std::int64_t kStatesAByte = 4;  // two bits each
  return num_prepared_ * (keys_.row_bytes() + (meta_ ? meta_->row_bytes() : 0)) +
         (num_prepared_ + kStatesAByte - 1) / kStatesAByte +
         static_cast<std::int64_t>(free_.capacity() * sizeof(std::uint32_t) +
                                   kept_back_.capacity() * sizeof(KeptBack));
}

}  // namespace recsdk::internal
