// What a save keeps of eviction, and a restore sets: metadata and clock without batches in flight.
#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "index/index_impl.h"

namespace recsdk {

using internal::EvictionClock;
using internal::kWordRows;

namespace {

bool is_earlier(const EvictionClock& a, const EvictionClock& b) {
  return std::pair(a.is_begun, a.step) < std::pair(b.is_begun, b.step);
}

using Undo = std::pair<std::uint32_t, const std::int64_t*>;

}  // namespace

std::vector<std::int64_t> Index::Impl::visible_meta(const internal::RowBits& rows,
                                                    std::int64_t count) const {
  const std::int64_t num_words = evictor->meta().num_words();
  // What batches in flight changed, by row; of a row what the oldest found comes first.
  std::vector<Undo> undone;
  for (const auto& record : open_steps) {
    const auto& touched = record->touched;
    const auto stride = static_cast<std::size_t>(num_words) + 1;
    for (std::size_t i = 0; i < touched.size(); i += stride)
      undone.emplace_back(static_cast<std::uint32_t>(touched[i]), &touched[i + 1]);
  }
  std::stable_sort(undone.begin(), undone.end(),
                   [](const Undo& a, const Undo& b) { return a.first < b.first; });
  std::vector<std::int64_t> words;
  words.reserve(static_cast<std::size_t>(count * num_words));
  auto undo = undone.cbegin();
  for (std::int64_t i = 0; i < (numbers.end() + kWordRows - 1) / kWordRows; ++i) {
    for (std::uint64_t bits = rows.word(i); bits != 0; bits &= bits - 1) {
      const RowNumber row = i * kWordRows + std::countr_zero(bits);
      while (undo != undone.cend() && undo->first < row) ++undo;
      const bool is_undone = undo != undone.cend() && undo->first == row;
      const std::int64_t* const found = is_undone ? undo->second : numbers.meta(row);
      words.insert(words.end(), found, found + num_words);
    }
  }
  return words;
}

EvictionState Index::Impl::visible_state() const noexcept {
  EvictionClock visible = clock;
  for (const auto& record : open_steps) {
    if (record->clock_before && is_earlier(*record->clock_before, visible))
      visible = *record->clock_before;
  }
  return {visible.step, visible.lease_step, visible.is_begun, time};
}

void Index::Impl::set_state(const EvictionState& state) noexcept {
  clock = {state.step, state.lease_step, state.is_begun};
  time = state.time;
}

}  // namespace recsdk
