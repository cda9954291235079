#include "keymap/arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace recsdk::internal {
namespace {

// Address space that is taken at a time: memory comes as it is touched, in small pages at first,
// of so little that most keys of any larger table are on huge ones.
constexpr std::size_t kFirstChunk = kHugePage / 8;
constexpr std::size_t kLaterChunk = std::size_t{64} << 20;

}  // namespace

std::size_t Arena::unit_of(const Chunk& chunk, const void* block) {
  return static_cast<std::size_t>(static_cast<const std::byte*>(block) - chunk.pages.data()) /
         kUnit;
}

Arena::Chunk& Arena::chunk_of(const std::byte* block) noexcept {
  const auto after =
      std::upper_bound(chunks_.begin(), chunks_.end(), block,
                       [](const std::byte* b, const Chunk& c) { return b < c.pages.data(); });
  return *(after - 1);
}

void Arena::link(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept {
  bytes_free_ += units * kUnit;
  chunk.free_lengths[unit] = units;
  chunk.free_lengths[unit + units - 1] = units;
  FreeRun*& head = bins_[bin_of(units)];
  auto* const run = reinterpret_cast<FreeRun*>(chunk.pages.data() + unit * kUnit);
  *run = {nullptr, head, units};
  if (head != nullptr) head->previous = run;
  head = run;
}

void Arena::unlink(Chunk& chunk, std::size_t unit) noexcept {
  auto* const run = reinterpret_cast<FreeRun*>(chunk.pages.data() + unit * kUnit);
  bytes_free_ -= run->units * kUnit;
  chunk.free_lengths[unit] = 0;
  chunk.free_lengths[unit + run->units - 1] = 0;
  if (run->previous != nullptr) {
    run->previous->next = run->next;
  } else {
    bins_[bin_of(run->units)] = run->next;
  }
  if (run->next != nullptr) run->next->previous = run->previous;
}

Arena::Chunk& Arena::add_chunk(std::size_t bytes) {
  const std::size_t wanted = chunks_.empty() ? kFirstChunk : kLaterChunk;
  if (newest_ != nullptr) {  // what is left of it
    const Chunk& last = chunk_of(newest_);
    if (const std::size_t left = last.pages.size() - last.used; left > 0) cut_off(left);
  }
  chunks_.reserve(chunks_.size() + 1);
  Pages pages(std::max(bytes, wanted), 0);
  std::vector<std::uint32_t> free_lengths(pages.size() / kUnit, 0);
  newest_ = pages.data();
  const auto place =
      std::upper_bound(chunks_.begin(), chunks_.end(), newest_,
                       [](const std::byte* b, const Chunk& c) { return b < c.pages.data(); });
  return *chunks_.insert(place, Chunk{std::move(pages), 0, 0, std::move(free_lengths)});
}

// The newest chunk, with so many bytes that were never used. Throws as add_chunk.
Arena::Chunk& Arena::chunk_with(std::size_t bytes) {
  Chunk* const chunk = newest_ == nullptr ? nullptr : &chunk_of(newest_);
  return chunk == nullptr || chunk->pages.size() - chunk->used < bytes ? add_chunk(bytes) : *chunk;
}

// Makes a free run of memory that was never used. Throws as add_chunk.
Arena::Chunk& Arena::cut_off(std::size_t bytes) {
  Chunk& chunk = chunk_with(bytes);
  const auto unit = static_cast<std::uint32_t>(chunk.used / kUnit);
  chunk.used += bytes;
  release(chunk, unit, static_cast<std::uint32_t>(bytes / kUnit));
  return chunk;
}

// A run of an acceptable length, the nearest to `units` first; else the shortest that is longer,
// but of those longer than any bin the first.
Arena::FreeRun* Arena::find_run(std::uint32_t units, std::uint32_t less) const noexcept {
  for (std::uint32_t length = units; length > 0 && length + less >= units; --length) {
    if (length < kNumBins && bins_[length] != nullptr) return bins_[length];
  }
  for (std::uint32_t length = units + 1; length < kNumBins; ++length) {
    if (bins_[length] != nullptr) return bins_[length];
  }
  for (FreeRun* run = bins_[0]; run != nullptr; run = run->next) {
    if (run->units >= units) return run;
  }
  return nullptr;
}

std::byte* Arena::allocate(std::uint32_t& units, std::uint32_t less) {
  std::byte* block = allocate_used(units, less);
  if (block == nullptr) {
    cut_off(units * kUnit);
    block = allocate_used(units, less);
  }
  return block;
}

std::byte* Arena::take_fresh(std::uint32_t& units) {
  const std::size_t bytes = units * kUnit;
  Chunk& chunk = chunk_with(bytes);
  std::byte* const block = chunk.pages.data() + chunk.used;
  // The first chunk lies on small pages.
  const bool is_huge = chunk.pages.size() >= kHugePage;
  const std::size_t end = chunk.used + bytes;
  chunk.used = is_huge ? std::min(next_huge_page(end), chunk.pages.size()) : end;
  units += static_cast<std::uint32_t>((chunk.used - end) / kUnit);
  return block;
}

std::byte* Arena::allocate_used(std::uint32_t& units, std::uint32_t less) noexcept {
  FreeRun* const run = find_run(units, less);
  if (run == nullptr) return nullptr;
  auto* const block = reinterpret_cast<std::byte*>(run);
  Chunk& chunk = chunk_of(block);
  const std::size_t unit = unit_of(chunk, block);
  units = std::min(units, run->units);
  const std::uint32_t left = run->units - units;
  unlink(chunk, unit);
  if (left > 0) link(chunk, unit + units, left);
  return block;
}

void Arena::free(std::byte* block, std::uint32_t units) noexcept {
  Chunk& chunk = chunk_of(block);
  release(chunk, unit_of(chunk, block), units);
}

// Makes units a free run, joined with its free neighbours.
void Arena::release(Chunk& chunk, std::size_t unit, std::uint32_t units) noexcept {
  const std::size_t after = unit + units;
  if (after < chunk.free_lengths.size() && chunk.free_lengths[after] != 0) {
    units += chunk.free_lengths[after];
    unlink(chunk, after);
  }
  if (unit > 0 && chunk.free_lengths[unit - 1] != 0) {
    const std::uint32_t before = chunk.free_lengths[unit - 1];
    unit -= before;
    units += before;
    unlink(chunk, unit);
  }
  link(chunk, unit, units);
}

bool Arena::has_runs(std::uint32_t units, std::uint32_t count) const noexcept {
  std::uint32_t found = 0;
  const auto count_bin = [&](const FreeRun* run) {
    for (; run != nullptr && found < count; run = run->next) found += run->units / units;
  };
  for (std::uint32_t bin = units; bin < kNumBins && found < count; ++bin) count_bin(bins_[bin]);
  count_bin(bins_[0]);
  return found >= count;
}

std::byte* Arena::move_down(std::byte* block, std::uint32_t units) noexcept {
  Chunk& chunk = chunk_of(block);
  const std::size_t unit = unit_of(chunk, block);
  const std::uint32_t before = chunk.free_lengths[unit - 1];
  unlink(chunk, unit - before);
  std::byte* const moved = block - before * kUnit;
  std::memmove(moved, block, units * kUnit);
  release(chunk, unit - before + units, before);
  return moved;
}

void Arena::reserve(std::size_t bytes) {
  if (bytes <= bytes_free_) return;
  const std::size_t missing = (bytes - bytes_free_ + kUnit - 1) / kUnit * kUnit;
  const Chunk& chunk = cut_off(missing);
  chunk.pages.populate(chunk.used - missing, chunk.used);
}

bool Arena::populate_ahead() noexcept {
  constexpr std::size_t kLargeArena = 3;  // chunks
  if (chunks_.size() < kLargeArena) return false;
  Chunk& chunk = chunk_of(newest_);
  const std::size_t begin = next_huge_page(chunk.used);
  const std::size_t end = begin + kHugePage;
  if (begin - chunk.used > kHugePage / 2 || end > chunk.pages.size() || end <= chunk.populated)
    return false;
  chunk.pages.populate(begin, end);
  chunk.populated = end;
  return true;
}

std::size_t Arena::bytes_held() const noexcept {
  std::size_t bytes = 0;
  for (const Chunk& chunk : chunks_) {
    const std::size_t page = chunk.pages.size() < kHugePage ? kUnit : kHugePage;
    bytes += std::max((chunk.used + page - 1) / page * page, chunk.populated);
  }
  return bytes;
}

std::size_t Arena::bytes_given() const noexcept {
  std::size_t bytes = 0;
  for (const Chunk& chunk : chunks_) bytes += chunk.used;
  return bytes - bytes_free_;
}

void Arena::clear() noexcept {
  chunks_.clear();
  chunks_.shrink_to_fit();
  std::fill_n(bins_, kNumBins, nullptr);
  newest_ = nullptr;
  bytes_free_ = 0;
}

void Arena::swap(Arena& other) noexcept {
  chunks_.swap(other.chunks_);
  std::swap(newest_, other.newest_);
  std::swap(bins_, other.bins_);
  std::swap(bytes_free_, other.bytes_free_);
}

}  // namespace recsdk::internal
