#include "table/arena.h"

#include <algorithm>

namespace recsdk::internal {
namespace {

constexpr std::size_t kFirstChunk = std::size_t{64} << 10;
constexpr std::size_t kLargestChunk = std::size_t{32} << 20;

}  // namespace

void Arena::add_chunk(std::size_t bytes) {
  // Doubling keeps the number of chunks small, and small tables small.
  const std::size_t wanted = std::clamp(bytes_held_, kFirstChunk, kLargestChunk);
  chunks_.reserve(chunks_.size() + 1);
  Pages pages(std::max(bytes, wanted), 0);
  bytes_held_ += pages.size();
  chunks_.push_back(std::move(pages));
  used_ = 0;
}

std::byte* Arena::allocate(std::size_t bytes) {
  FreeBlocks& free_blocks = free_[bytes];
  if (!free_blocks.blocks.empty()) {
    std::byte* const block = free_blocks.blocks.back();
    free_blocks.blocks.pop_back();
    return block;
  }
  if (free_blocks.blocks.capacity() <= free_blocks.num_made) {
    free_blocks.blocks.reserve(2 * free_blocks.num_made + 4);
  }
  if (chunks_.empty() || chunks_.back().size() - used_ < bytes) add_chunk(bytes);
  std::byte* const block = chunks_.back().data() + used_;
  used_ += bytes;
  ++free_blocks.num_made;
  return block;
}

void Arena::free(std::byte* block, std::size_t bytes) noexcept {
  free_.find(bytes)->second.blocks.push_back(block);
}

void Arena::reserve(std::size_t bytes) {
  if (!chunks_.empty() && chunks_.back().size() - used_ >= bytes) {
    chunks_.back().populate(used_, used_ + bytes);
    return;
  }
  add_chunk(bytes);
  chunks_.back().populate(0, bytes);
}

}  // namespace recsdk::internal
