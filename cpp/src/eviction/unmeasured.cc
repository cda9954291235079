#include "eviction/unmeasured.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace recsdk::internal {

namespace {

void add_rows(RowNumber begin, std::uint64_t bits, std::vector<std::uint32_t>& rows) {
  for (; bits != 0; bits &= bits - 1)
    rows.push_back(static_cast<std::uint32_t>(begin + std::countr_zero(bits)));
}

}  // namespace

std::vector<std::uint32_t> used_rows(const RowNumbers& numbers) {
  std::vector<std::uint32_t> rows;
  rows.reserve(static_cast<std::size_t>(numbers.end()));
  for (RowNumber begin = 0; begin < numbers.end(); begin += kWordRows)
    add_rows(begin, numbers.used_word(begin / kWordRows), rows);
  return rows;
}

UsedSample sample_used(std::int64_t num_used, const RowNumbers& numbers) {
  constexpr std::int64_t kMost = 4096;
  UsedSample sample;
  sample.stride = static_cast<std::size_t>(num_used / kMost + 1);
  sample.rows.reserve(kMost + kWordRows);
  std::size_t skipped = 0;
  for (RowNumber begin = 0; begin < numbers.end(); begin += kWordRows) {
    std::uint64_t used = numbers.used_word(begin / kWordRows);
    const auto count = static_cast<std::size_t>(std::popcount(used));
    if (skipped + count < sample.stride) {
      skipped += count;
      continue;
    }
    for (; used != 0; used &= used - 1) {
      if (++skipped < sample.stride) continue;
      sample.rows.push_back(static_cast<std::uint32_t>(begin + std::countr_zero(used)));
      skipped = 0;
    }
  }
  return sample;
}

std::vector<std::uint32_t> Unmeasured::take(const RowNumbers& numbers) {
  std::vector<std::uint32_t> taken;
  if (has_all_) {
    taken = used_rows(numbers);
    for (std::int64_t i = 0; i < rows_.num_words(); ++i) rows_.take_word(i);
    has_all_ = false;
    return taken;
  }
  std::size_t num_noted = kWordRows;
  for (std::int64_t i = 0; i < rows_.num_words(); ++i)
    num_noted += static_cast<std::size_t>(std::popcount(rows_.load_word(i)));
  taken.reserve(num_noted);
  try {
    for (std::int64_t i = 0; i < rows_.num_words(); ++i) {
      if (taken.capacity() - taken.size() < kWordRows) taken.reserve(2 * taken.size() + kWordRows);
      const std::uint64_t noted = rows_.take_word(i);
      if (noted != 0) add_rows(i * kWordRows, noted & numbers.used_word(i), taken);
    }
  } catch (...) {
    put_back(taken);
    throw;
  }
  return taken;
}

void Unmeasured::put_back(std::span<const std::uint32_t> rows) noexcept {
  for (const std::uint32_t row : rows) rows_.set(row);
}

}  // namespace recsdk::internal
