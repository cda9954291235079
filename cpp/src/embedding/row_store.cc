#include "embedding/row_store.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "recsdk/error.h"
#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

// The index holds 32-bit row numbers, one of which stands for none.
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 32) - 1;
constexpr std::int64_t kRecordSlab = std::int64_t{64} << 20;
constexpr std::int64_t kMetadataSlab = std::int64_t{4} << 20;

int shift_of(std::int64_t row_bytes, std::int64_t slab_bytes) {
  const auto per_slab =
      static_cast<std::uint64_t>(std::max<std::int64_t>(slab_bytes / row_bytes, 1));
  return static_cast<int>(std::bit_width(per_slab)) - 1;
}

}  // namespace

Slabs::Slabs(std::int64_t stride, std::int64_t scalar_stride, std::int64_t slab_bytes)
    : stride_(stride),
      scalar_stride_(scalar_stride),
      shift_(shift_of(stride + scalar_stride, slab_bytes)),
      // Untouched pages cost nothing, so the directory is as long as it will ever be.
      directory_(static_cast<std::size_t>((kMaxRows >> shift_) + 1) * sizeof(std::byte*),
                 SIZE_MAX) {}

void Slabs::grow(std::int64_t count) {
  const std::int64_t needed = (count + (std::int64_t{1} << shift_) - 1) >> shift_;
  if (needed <= static_cast<std::int64_t>(slabs_.size())) return;
  slabs_.reserve(static_cast<std::size_t>(needed));
  const auto slab_bytes = static_cast<std::size_t>(row_bytes() << shift_);
  while (static_cast<std::int64_t>(slabs_.size()) < needed) {
    // The start of the first slab stays on small pages: a small table shall cost little.
    Pages slab(slab_bytes, slabs_.empty() ? kHugePage : 0);
    reinterpret_cast<std::byte**>(directory_.data())[slabs_.size()] = slab.data();
    slabs_.push_back(std::move(slab));
  }
}

void Slabs::populate(std::int64_t begin, std::int64_t end) const noexcept {
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t slab = i >> shift_;
    const std::int64_t last = std::min(end, (slab + 1) << shift_);
    const std::int64_t base = slab << shift_;
    const auto populate = [&](std::int64_t start, std::int64_t stride) {
      slabs_[static_cast<std::size_t>(slab)].populate(
          static_cast<std::size_t>(start + (i - base) * stride),
          static_cast<std::size_t>(start + (last - base) * stride));
    };
    populate(0, stride_);
    if (scalar_stride_ > 0) populate(stride_ << shift_, scalar_stride_);
    i = last;
  }
}

bool Slabs::populate_ahead(std::int64_t count) noexcept {
  constexpr std::size_t kLargeArray = 16 * kHugePage;
  const auto stride = static_cast<std::size_t>(stride_);
  if (static_cast<std::size_t>(count) * stride < kLargeArray) return false;
  const std::int64_t first = count >> shift_ << shift_;  // of its slab
  const std::size_t used = static_cast<std::size_t>(count - first) * stride;
  std::size_t begin = next_huge_page(used);
  if (begin - used > kHugePage / 2) return false;
  std::int64_t slab = count >> shift_;
  if (begin >= stride << shift_) {  // the page is the first of the next slab
    begin = 0;
    ++slab;
  }
  if (slab > kMaxRows >> shift_) return false;  // there are no rows as high
  const std::int64_t last = (slab << shift_) + static_cast<std::int64_t>(begin / stride);
  if (last < populated_) return false;
  try {
    grow(last + 1);
  } catch (...) {
    return false;  // it is not needed yet
  }
  slabs_[static_cast<std::size_t>(slab)].populate(begin, begin + kHugePage);
  populated_ = last + 1;
  return true;
}

RowStore::RowStore(const RowLayout& layout)
    : records_(layout.stride, layout.scalar_stride, kRecordSlab),
      keys_(static_cast<std::int64_t>(sizeof(Key)), 0, kMetadataSlab),
      states_(static_cast<std::int64_t>(sizeof(RowState)), 0, kMetadataSlab / 8) {}

void RowStore::prepare_allocate(std::int64_t count) {
  const std::int64_t needed =
      end_ + std::max<std::int64_t>(count - static_cast<std::int64_t>(free_.size()), 0);
  if (needed > num_prepared_) {
    if (needed > kMaxRows) {
      throw Error(ErrorCode::kCapacity, "a table holds at most 2^32 - 1 rows, and " +
                                            std::to_string(needed) +
                                            " are needed; shard it over more ranks");
    }
    records_.grow(needed);
    keys_.grow(needed);
    states_.grow(needed);
    num_prepared_ = needed;
  }
}

void RowStore::prepare_free(std::int64_t count) {
  const auto needed = static_cast<std::size_t>(count) + free_.size() + kept_back_.size();
  // Doubling, as push_back would.
  if (free_.capacity() < needed) free_.reserve(std::max(needed, 2 * free_.capacity()));
  if (kept_back_.capacity() < needed)
    kept_back_.reserve(std::max(needed, 2 * kept_back_.capacity()));
}

std::uint32_t RowStore::allocate(Key key, RowState state) noexcept {
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

bool RowStore::prepare_append(std::int64_t count) {
  const std::int64_t needed = end_ + count;
  if (!free_.empty() || needed > kMaxRows) return false;
  records_.grow(needed);
  keys_.grow(needed);
  states_.grow(needed);
  return true;
}

void RowStore::append(std::span<const Key> keys, const Outcome* outcomes, RowState state) noexcept {
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
    for (std::size_t j = 0; j < count; ++j, ++next) {
      *keys_.at<Key>(next) = block[j];
      *states_.at<RowState>(next) = state;
    }
  }
  end_.store(next, std::memory_order_relaxed);
  num_prepared_ = std::max(num_prepared_, next);
}

void RowStore::undo_allocate(std::uint32_t row, RowNumber old_end) noexcept {
  set_state(row, RowState::kFree);
  if (row >= old_end) {
    end_.store(end() - 1, std::memory_order_relaxed);
  } else {
    free_.push_back(row);  // its place is still there
  }
}

void RowStore::free(std::uint32_t row, std::uint64_t epoch) noexcept {
  set_state(row, RowState::kFree);
  kept_back_.push_back({epoch, row});
}

void RowStore::release_before(std::uint64_t epoch) {
  const auto end = std::find_if(kept_back_.begin(), kept_back_.end(),
                                [epoch](const KeptBack& k) { return k.epoch >= epoch; });
  for (auto it = kept_back_.begin(); it != end; ++it) free_.push_back(it->row);
  kept_back_.erase(kept_back_.begin(), end);
}

std::uint64_t RowStore::visible_bits(std::int64_t i) const noexcept {
  const RowState* const states = states_.at<RowState>(i * 64);
  std::uint64_t bits = 0;
  for (std::size_t byte = 0; byte < 8; ++byte) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, states + byte * 8, sizeof(eight));
    // The product moves the lowest bit of each of the eight bytes into the highest byte.
    const std::uint64_t gathered = (eight & 0x0101010101010101U) * 0x0102040810204080U >> 56;
    bits |= gathered << (byte * 8);
  }
  return bits;
}

void RowStore::swap(RowStore& other) noexcept {
  std::swap(records_, other.records_);
  std::swap(keys_, other.keys_);
  std::swap(states_, other.states_);
  free_.swap(other.free_);
  kept_back_.swap(other.kept_back_);
  std::swap(num_prepared_, other.num_prepared_);
  end_ = other.end_.exchange(end_);
}

void RowStore::reserve(std::int64_t count) {
  prepare_allocate(
      std::max<std::int64_t>(count - end_ + static_cast<std::int64_t>(free_.size()), 0));
  records_.populate(end_, num_prepared_);
  keys_.populate(end_, num_prepared_);
  states_.populate(end_, num_prepared_);
}

void RowStore::populate_next(std::int64_t count, int max_threads) const {
  const std::int64_t last = std::min(end() + count, num_prepared_);
  const auto grain =
      std::max<std::int64_t>(static_cast<std::int64_t>(kHugePage) / records_.row_bytes(), 1);
  const std::int64_t first_piece = end() / grain;
  const std::int64_t num_pieces = (last + grain - 1) / grain - first_piece;
  parallel_for(num_pieces, 1, max_threads, [&](std::int64_t begin, std::int64_t end_piece) {
    records_.populate(std::max(end(), (first_piece + begin) * grain),
                      std::min(last, (first_piece + end_piece) * grain));
  });
}

std::int64_t RowStore::metadata_bytes() const noexcept {
  return num_prepared_ * (keys_.row_bytes() + states_.row_bytes()) +
         static_cast<std::int64_t>(free_.capacity() * sizeof(std::uint32_t) +
                                   kept_back_.capacity() * sizeof(KeptBack));
}

}  // namespace recsdk::internal
