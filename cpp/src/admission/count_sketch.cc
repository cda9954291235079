#include "admission/count_sketch.h"

#include <algorithm>

#include "util/hash.h"

namespace recsdk::internal {

namespace {

constexpr std::int64_t kWordBytes = sizeof(std::uint64_t);

// Uniform in [0, end).
std::uint64_t scaled(std::uint64_t bits, std::uint64_t end) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(bits) * end >> 64);
}

std::uint64_t in_row(std::int64_t count, std::size_t row) {
  return static_cast<std::uint64_t>(count) << (row * CountSketch::kCounterBits);
}

}  // namespace

static_assert(kFewestSketchBytes == kNumVirtualShards * kWordBytes);

CountSketch::CountSketch(std::int64_t max_bytes, std::int64_t most)
    : width_(static_cast<std::uint64_t>(max_bytes / kFewestSketchBytes)), most_(most) {}

CountSketch::Cells CountSketch::cells_of(Key key) const noexcept {
  const std::uint64_t hash = virtual_shard_hash(static_cast<std::uint64_t>(key));
  Cells cells{};
  for (std::size_t row = 0; row < kDepth; ++row)
    cells[row] = scaled(mix64(hash + (row + 1) * kIncrement), width_) << 16U | (hash & 0xFFFFU);
  return cells;
}

std::uint64_t CountSketch::word(std::uint64_t cell) const noexcept {
  const bool has_page = page(cell) < pages_.size() && pages_[page(cell)] != nullptr;
  return has_page ? pages_[page(cell)][place(cell)] : 0;
}

void CountSketch::prepare(std::uint64_t cell) {
  if (pages_.empty()) pages_.resize(kNumVirtualShards / kPageShards);
  if (pages_[page(cell)] == nullptr)
    pages_[page(cell)] = std::make_unique<std::uint64_t[]>(kPageShards * width_);
}

void CountSketch::set(std::uint64_t cell, std::uint64_t word) noexcept {
  pages_[page(cell)][place(cell)] = word;
}

void CountSketch::add(Key key, std::int64_t count) noexcept {
  const Cells cells = cells_of(key);
  for (std::size_t row = 0; row < kDepth; ++row) {
    std::uint64_t& word = pages_[page(cells[row])][place(cells[row])];
    word += in_row(std::min(count, most_ - counter(word, row)), row);
  }
}

AdmitRecord CountSketch::record(std::uint64_t cell, std::uint64_t word) noexcept {
  return {.key = static_cast<Key>(virtual_shard_key(cell)),
          .count = static_cast<std::int64_t>(word)};
}

bool CountSketch::has_place_for(const AdmitRecord& record) const noexcept {
  return virtual_shard_hash(static_cast<std::uint64_t>(record.key)) >> 16U < width_ &&
         record.clicks == 0;
}

void CountSketch::assign(const AdmitRecord& record) {
  const std::uint64_t cell = virtual_shard_hash(static_cast<std::uint64_t>(record.key));
  prepare(cell);
  set(cell, capped(static_cast<std::uint64_t>(record.count)));
}

std::uint64_t CountSketch::capped(std::uint64_t word) const noexcept {
  std::uint64_t capped = 0;
  for (std::size_t row = 0; row < kDepth; ++row)
    capped |= in_row(std::min(counter(word, row), most_), row);
  return capped;
}

std::int64_t CountSketch::bytes() const noexcept {
  const auto num_pages = static_cast<std::uint64_t>(std::count_if(
      pages_.begin(), pages_.end(), [](const auto& each) { return each != nullptr; }));
  return static_cast<std::int64_t>(num_pages * kPageShards * width_) * kWordBytes;
}

std::string CountSketch::find_broken() const {
  std::string what;
  for_each([&](std::uint64_t /*cell*/, std::uint64_t word) {
    if (capped(word) != word) what = "a counter of a sketch is beyond the most that it counts to";
  });
  return what;
}

}  // namespace recsdk::internal
