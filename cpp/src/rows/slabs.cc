#include "rows/slabs.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "util/thread_pool.h"

namespace recsdk::internal {
namespace {

int shift_of(std::int64_t row_bytes, std::int64_t slab_bytes) {
  const auto per_slab =
      static_cast<std::uint64_t>(std::max<std::int64_t>(slab_bytes / row_bytes, 1));
  return static_cast<int>(std::bit_width(per_slab)) - 1;
}

// Of records, and of scalars, on small pages: more would cost lookups, less would cost memory.
constexpr std::size_t kFewRecords = kHugePage / 4;
constexpr std::size_t kFewScalars = kHugePage / 32;

// Where the scalars of a large slab begin: the first few right before a huge page, and behind the
// last of those that have records.
std::int64_t scalars_begin_of(std::int64_t record_bytes, std::size_t lead) {
  const std::size_t end = next_huge_page(lead + static_cast<std::size_t>(record_bytes));
  return static_cast<std::int64_t>(end + kHugePage - kFewScalars - lead);
}

}  // namespace

Slabs::Slabs(std::int64_t stride, std::int64_t scalar_stride, std::int64_t slab_bytes)
    : stride_(stride),
      scalar_stride_(scalar_stride),
      shift_(shift_of(stride + scalar_stride, slab_bytes)),
      first_lead_(static_cast<std::size_t>(stride << shift_) < kHugePage ? 0
                                                                         : kHugePage - kFewRecords),
      scalars_begin_(first_lead_ == 0 || scalar_stride == 0
                         ? stride << shift_
                         : scalars_begin_of(stride << shift_, first_lead_)),
      // Untouched pages cost nothing, so the directory is as long as it will ever be.
      directory_(static_cast<std::size_t>((kMaxRows >> shift_) + 1) * sizeof(std::byte*),
                 SIZE_MAX) {}

Pages Slabs::make_first() const {
  const std::size_t bytes = first_lead_ + slab_bytes();
  if (first_lead_ == 0 || scalar_stride_ == 0) return {bytes, kHugePage};
  const std::size_t scalars = first_lead_ + static_cast<std::size_t>(scalars_begin_);
  Pages slab(bytes, kHugePage, scalars / kHugePage * kHugePage);
  slab.ask_for_huge_pages(next_huge_page(scalars), SIZE_MAX);
  return slab;
}

void Slabs::grow(std::int64_t count) {
  const std::int64_t needed = (count + (std::int64_t{1} << shift_) - 1) >> shift_;
  if (needed <= static_cast<std::int64_t>(slabs_.size())) return;
  slabs_.reserve(static_cast<std::size_t>(needed));
  while (static_cast<std::int64_t>(slabs_.size()) < needed) {
    Pages slab = slabs_.empty() ? make_first() : Pages(slab_bytes(), 0);
    const std::size_t number = slabs_.size();
    reinterpret_cast<std::byte**>(directory_.data())[number] = slab.data() + lead_of(number);
    slabs_.push_back(std::move(slab));
  }
}

void Slabs::populate_part(std::int64_t slab, std::int64_t begin, std::int64_t end,
                          const Bytes& part) const noexcept {
  const std::int64_t base = slab << shift_;
  const std::int64_t first = std::max<std::int64_t>(begin - base, 0);
  const std::int64_t last = std::min(end - base, std::int64_t{1} << shift_);
  const auto number = static_cast<std::size_t>(slab);
  const auto populate = [&](std::int64_t start, std::int64_t stride) {
    const std::size_t from = lead_of(number) + static_cast<std::size_t>(start + first * stride);
    const std::size_t to = lead_of(number) + static_cast<std::size_t>(start + last * stride);
    slabs_[number].populate(std::max(from, part.begin), std::min(to, part.end));
  };
  populate(0, stride_);
  if (scalar_stride_ > 0) populate(scalars_begin_, scalar_stride_);
}

void Slabs::populate(std::int64_t begin, std::int64_t end) const noexcept {
  if (begin >= end) return;
  for (std::int64_t slab = begin >> shift_; slab <= (end - 1) >> shift_; ++slab)
    populate_part(slab, begin, end, {0, SIZE_MAX});
}

void Slabs::populate_pages(std::int64_t begin, std::int64_t end, int max_threads) const {
  if (begin >= end) return;
  constexpr auto kPage = static_cast<std::int64_t>(kHugePage);
  const auto lead = static_cast<std::int64_t>(first_lead_);
  const std::int64_t mask = (std::int64_t{1} << shift_) - 1;
  // Their numbers go on from slab to slab.
  const auto num_each =
      static_cast<std::int64_t>(next_huge_page(first_lead_ + slab_bytes()) / kHugePage);
  const auto page_of = [&](std::int64_t row, std::int64_t byte) {
    const std::int64_t slab = row >> shift_;
    return slab * num_each + ((slab == 0 ? lead : 0) + byte) / kPage;
  };
  const std::int64_t in_slab = ((end - 1) & mask) + 1;
  const std::int64_t end_byte =
      scalar_stride_ > 0 ? scalars_begin_ + in_slab * scalar_stride_ : in_slab * stride_;
  const std::int64_t first = page_of(begin, (begin & mask) * stride_);
  const std::int64_t num_pages = page_of(end - 1, end_byte - 1) + 1 - first;
  parallel_for(num_pages, 1, max_threads, [&](std::int64_t i, std::int64_t last) {
    for (; i < last; ++i) {
      const auto page = static_cast<std::size_t>((first + i) % num_each) * kHugePage;
      populate_part((first + i) / num_each, begin, end, {page, page + kHugePage});
    }
  });
}

bool Slabs::populate_ahead(std::int64_t count) noexcept {
  constexpr std::size_t kLargeArray = 16 * kHugePage;
  const auto stride = static_cast<std::size_t>(stride_);
  if (static_cast<std::size_t>(count) * stride < kLargeArray) return false;
  std::int64_t slab = count >> shift_;
  std::size_t lead = lead_of(static_cast<std::size_t>(slab));
  const std::size_t used = lead + static_cast<std::size_t>(count - (slab << shift_)) * stride;
  std::size_t begin = next_huge_page(used);
  if (begin - used > kHugePage / 2) return false;
  if (begin >= lead + (stride << shift_)) {  // the page is the first of the next slab
    begin = lead = 0;
    ++slab;
  }
  if (slab > kMaxRows >> shift_) return false;  // there are no rows as high
  const std::int64_t last = (slab << shift_) + static_cast<std::int64_t>((begin - lead) / stride);
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
