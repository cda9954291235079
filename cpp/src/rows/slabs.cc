#include "rows/slabs.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

// The scalars of so many bytes of records are on a huge page, most of which may be empty.
constexpr std::size_t kManyBytes = 4 * kHugePage;

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
  if (slabs_.empty()) add_first(bytes_of(count));
  while (static_cast<std::int64_t>(slabs_.size()) < needed) add({slab_bytes(), 0});
}

// A small table shall cost little: what is small is on small pages at first.
void Slabs::add_first(std::size_t bytes_used) {
  const std::size_t scalars_at = scalars_page();
  const bool is_small = bytes_used < kHugePage;
  const bool has_few_scalars = scalar_stride_ > 0 && bytes_used < kManyBytes;
  add({slab_bytes(), is_small ? kHugePage : 0, has_few_scalars ? scalars_at : SIZE_MAX});
  is_small_ = is_small;
  has_few_scalars_ = has_few_scalars;
}

void Slabs::add(Pages slab) {
  reinterpret_cast<std::byte**>(directory_.data())[slabs_.size()] = slab.data();
  slabs_.push_back(std::move(slab));
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

void Slabs::populate_pages(std::int64_t begin, std::int64_t end, int max_threads) const {
  const auto grain = std::max<std::int64_t>(static_cast<std::int64_t>(kHugePage) / row_bytes(), 1);
  const std::int64_t first_page = begin / grain;
  const std::int64_t num_pages = (end + grain - 1) / grain - first_page;
  parallel_for(num_pages, 1, max_threads, [&](std::int64_t page, std::int64_t end_page) {
    populate(std::max(begin, (first_page + page) * grain),
             std::min(end, (first_page + end_page) * grain));
  });
}

bool Slabs::populate_ahead(std::int64_t count) noexcept {
  constexpr std::size_t kLargeArray = 16 * kHugePage;
  const auto stride = static_cast<std::size_t>(stride_);
  if (is_small_ && bytes_of(count) >= kHugePage) {
    is_small_ = false;
    slabs_.front().make_huge(0, kHugePage);
    return true;
  }
  if (has_few_scalars_ && bytes_of(count) >= kManyBytes) {
    has_few_scalars_ = false;
    slabs_.front().make_huge(scalars_page(), SIZE_MAX);
    return true;
  }
  if (bytes_of(count) < kLargeArray) return false;
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

}  // namespace recsdk::internal
