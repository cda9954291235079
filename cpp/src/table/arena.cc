#include "table/arena.h"

#include <algorithm>

namespace recsdk::internal {
namespace {

constexpr std::size_t kFirstChunk = std::size_t{64} << 10;
constexpr std::size_t kLargestChunk = std::size_t{32} << 20;

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
  // Doubling keeps the number of chunks small, and small tables small.
  const std::size_t wanted = std::clamp(bytes_held_, kFirstChunk, kLargestChunk);
  chunks_.reserve(chunks_.size() + 1);
  Pages pages(std::max(bytes, wanted), 0);
  const std::size_t units = pages.size() / kUnit;
  std::vector<std::uint32_t> free_lengths(units, 0);
  const auto place =
      std::upper_bound(chunks_.begin(), chunks_.end(), pages.data(),
                       [](const std::byte* b, const Chunk& c) { return b < c.pages.data(); });
  bytes_held_ += pages.size();
  const auto chunk = chunks_.insert(place, Chunk{std::move(pages), std::move(free_lengths)});
  link(*chunk, 0, static_cast<std::uint32_t>(units));
  return *chunk;
}

Arena::FreeRun* Arena::find_run(std::uint32_t units) noexcept {
  for (std::uint32_t bin = units; bin < kNumBins; ++bin) {
    if (bins_[bin] != nullptr) return bins_[bin];
  }
  for (FreeRun* run = bins_[0]; run != nullptr; run = run->next) {
    if (run->units >= units) return run;
  }
  return nullptr;
}

std::byte* Arena::allocate(std::uint32_t units) {
  FreeRun* run = find_run(units);
  if (run == nullptr) {
    add_chunk(units * kUnit);
    run = find_run(units);
  }
  auto* const block = reinterpret_cast<std::byte*>(run);
  Chunk& chunk = chunk_of(block);
  const std::size_t unit = unit_of(chunk, block);
  const std::uint32_t left = run->units - units;
  unlink(chunk, unit);
  if (left > 0) link(chunk, unit + units, left);
  return block;
}

void Arena::free(std::byte* block, std::uint32_t units) noexcept {
  Chunk& chunk = chunk_of(block);
  std::size_t unit = unit_of(chunk, block);
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

void Arena::reserve(std::size_t bytes) {
  if (bytes <= bytes_free_) return;
  const std::size_t missing = bytes - bytes_free_;
  add_chunk(missing).pages.populate(0, missing);
}

void Arena::clear() noexcept {
  chunks_.clear();
  chunks_.shrink_to_fit();
  std::fill_n(bins_, kNumBins, nullptr);
  bytes_held_ = 0;
  bytes_free_ = 0;
}

}  // namespace recsdk::internal
