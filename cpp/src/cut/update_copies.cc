#include "cut/update_copies.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

bool begins_row(const GradItem* items, std::int64_t begin, std::int64_t i) {
  return i == begin || items[i].row != items[i - 1].row;
}

}  // namespace

CutState::UpdateCopies CutState::plan(const SortedGradients& gradients, int max_threads) {
  UpdateCopies copies;
  std::unique_lock lock(mutex_);
  if (is_closed_ || is_read()) return copies;
  const std::int64_t num_items = gradients.items.size();
  const auto for_pieces = [&](const auto& body) {
    parallel_for(num_items, kUpdateGrain, max_threads, [&](std::int64_t begin, std::int64_t end) {
      body(begin / kUpdateGrain, gradients.row_border(begin), gradients.row_border(end));
    });
  };
  const GradItem* const items = gradients.items.data();
  if (max_copy_bytes_) {
    std::atomic<std::int64_t> num_pending{0};
    for_pieces([&](std::int64_t, std::int64_t begin, std::int64_t end) {
      num_pending.fetch_add(count_pending(items, begin, end), std::memory_order_relaxed);
    });
    copies.bytes_to_wait_for_ = bytes_to_wait_for(num_pending.load());
    if (num_pending.load() == 0 || copies.bytes_to_wait_for_ > 0) return copies;
  }
  const std::int64_t held = copied_bytes_.load();
  copies.blocks_.resize(static_cast<std::size_t>((num_items + kUpdateGrain - 1) / kUpdateGrain));
  for_pieces([&](std::int64_t piece, std::int64_t begin, std::int64_t end) {
    make_blocks(items, begin, end, copies.blocks_[static_cast<std::size_t>(piece)]);
  });
  const std::int64_t planned = copied_bytes_.load() - held;
  if (planned == 0) return {};
  most_at_once_.store(std::max(most_at_once_.load(), planned));
  copies.lock_ = std::move(lock);
  copies.cut_ = this;
  copies.items_ = items;
  return copies;
}

std::int64_t CutState::count_pending(const GradItem* items, std::int64_t begin,
                                     std::int64_t end) const noexcept {
  std::int64_t count = 0;
  for (std::int64_t i = begin; i < end; ++i)
    count += static_cast<std::int64_t>(begins_row(items, begin, i) && is_pending(items[i].row));
  return count;
}

void CutState::make_blocks(const GradItem* items, std::int64_t begin, std::int64_t end,
                           std::vector<CopyBlock*>& made) {
  std::int64_t region = 0;
  std::int64_t count = 0;
  const auto make = [&] {
    while (count > 0) {
      made.push_back(make_block(region, count));
      count -= made.back()->count;
    }
  };
  for (std::int64_t i = begin; i < end; ++i) {
    if (!begins_row(items, begin, i) || !is_pending(items[i].row)) continue;
    const std::int64_t of_row = items[i].row / region_rows_;
    if (of_row != region) make();
    region = of_row;
    ++count;
  }
  make();
}

CutState::UpdateCopies::Piece::Piece(const UpdateCopies& copies, std::int64_t piece,
                                     std::int64_t end) noexcept
    : cut_(*copies.cut_),
      items_(copies.items_),
      end_(end),
      block_(copies.blocks_[static_cast<std::size_t>(piece)].data()) {}

void CutState::UpdateCopies::Piece::copy(std::int64_t begin, std::int64_t end) noexcept {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t ahead = i + kRowsAhead;
    if (ahead < end_ && begins_row(items_, begin, ahead)) cut_.fetch(items_[ahead].row);
    if (!begins_row(items_, begin, i) || !cut_.is_pending(items_[i].row)) continue;
    CopyBlock& block = **block_;
    cut_.fill(block, num_filled_++, items_[i].row);
    if (num_filled_ < block.count) continue;
    cut_.publish(block);
    ++block_;
    num_filled_ = 0;
  }
}

}  // namespace recsdk::internal
