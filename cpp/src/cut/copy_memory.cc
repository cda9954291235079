#include "cut/copy_memory.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "util/fork_gate.h"

namespace recsdk::internal {
namespace {

// A chunk's size is a multiple too, so what is left of one is.
std::size_t rounded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

void touch(std::byte* chunk) {
  constexpr std::size_t kPage = 4096;
  for (std::size_t i = 0; i < CopyMemory::kChunkBytes; i += kPage) chunk[i] = std::byte{0};
}

}  // namespace

CopyMemory::CopyMemory(std::int64_t num_bands)
    : num_bands_(num_bands),
      bands_(std::make_unique<Band[]>(static_cast<std::size_t>(num_bands))) {}

std::byte* CopyMemory::allocate(std::int64_t band, std::size_t head, std::size_t each,
                                std::int64_t& count) {
  Band& of = bands_[static_cast<std::size_t>(band)];
  const std::lock_guard lock(of.mutex);
  if (head + each > kChunkBytes - 7)
    return allocate_large(of, head + static_cast<std::size_t>(count) * each);
  if (of.left < head + each) {
    if (of.chunks.size() == of.chunks.capacity()) of.chunks.reserve(2 * of.chunks.size() + 8);
    of.chunks.push_back(take_chunk());
    of.left = kChunkBytes;
  }
  count = std::min(count, static_cast<std::int64_t>((of.left - head) / each));
  const std::size_t bytes = rounded(head + static_cast<std::size_t>(count) * each);
  std::byte* const place = of.chunks.back() + (kChunkBytes - of.left);
  of.left -= bytes;
  of.num_bytes += static_cast<std::int64_t>(bytes);
  return place;
}

// The band's mutex is held.
std::byte* CopyMemory::allocate_large(Band& of, std::size_t bytes) {
  of.large.emplace_back(rounded(bytes), SIZE_MAX);
  of.num_bytes += static_cast<std::int64_t>(rounded(bytes));
  return of.large.back().data();
}

// Last in, first out: memory that was used lately is in the processor's cache.
std::byte* CopyMemory::take_chunk() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return take_fresh_chunk();
  std::byte* const chunk = free_.back();
  free_.pop_back();
  return chunk;
}

// mutex_ is held.
std::byte* CopyMemory::take_fresh_chunk() {
  if (free_.capacity() <= num_chunks_) free_.reserve(2 * num_chunks_ + 64);
  if (used_ == kSlabBytes) {
    slabs_.emplace_back(kSlabBytes, SIZE_MAX);
    used_ = 0;
  }
  ++num_chunks_;
  std::byte* const chunk = slabs_.back().data() + used_;
  used_ += kChunkBytes;
  return chunk;
}

std::int64_t CopyMemory::release(std::int64_t band) noexcept {
  Band& of = bands_[static_cast<std::size_t>(band)];
  {
    const std::lock_guard lock(mutex_);
    for (std::byte* const chunk : of.chunks) free_.push_back(chunk);
  }
  of.chunks.clear();
  of.large.clear();
  of.left = 0;
  return std::exchange(of.num_bytes, 0);
}

bool CopyMemory::stock(std::int64_t bytes) noexcept {
  const auto wanted = static_cast<std::size_t>(bytes) / kChunkBytes;
  std::byte* chunk = nullptr;
  try {
    const auto gate = hold_off_fork();
    const std::lock_guard lock(mutex_);
    if (free_.size() >= wanted) return false;
    chunk = take_fresh_chunk();
  } catch (const std::exception&) {
    return false;  // whoever needs memory asks for it again, and says so
  }
  if (!populate_pages(chunk, kChunkBytes)) touch(chunk);
  const auto gate = hold_off_fork();
  const std::lock_guard lock(mutex_);
  free_.push_back(chunk);
  return true;
}

bool CopyMemory::recycle(std::int64_t keep) noexcept {
  for (std::int64_t band = 0; band < num_bands_; ++band) release(band);
  const std::lock_guard lock(mutex_);
  if (free_.size() != num_chunks_) return false;
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(keep, 0)) / kChunkBytes;
  num_chunks_ = std::min(wanted, num_chunks_);
  while (slabs_.size() * kSlabChunks >= num_chunks_ + kSlabChunks) slabs_.pop_back();
  used_ = kSlabBytes - (slabs_.size() * kSlabChunks - num_chunks_) * kChunkBytes;
  if (!slabs_.empty()) slabs_.back().discard(used_);
  free_.clear();
  for (std::size_t i = 0; i < num_chunks_; ++i)
    free_.push_back(slabs_[i / kSlabChunks].data() + i % kSlabChunks * kChunkBytes);
  return true;
}

std::size_t CopyMemory::chunk_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_chunks_ * kChunkBytes;
}

}  // namespace recsdk::internal
