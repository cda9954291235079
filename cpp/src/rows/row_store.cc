#include "rows/row_store.h"

#include "util/thread_pool.h"

namespace recsdk::internal {

void RowStore::populate_pages(RowNumber begin, RowNumber end, int max_threads) const {
  const auto grain = std::max<std::int64_t>(static_cast<std::int64_t>(kHugePage) / row_bytes(), 1);
  const std::int64_t first_page = begin / grain;
  const std::int64_t num_pages = (end + grain - 1) / grain - first_page;
  parallel_for(num_pages, 1, max_threads, [&](std::int64_t page, std::int64_t end_page) {
    populate(std::max(begin, (first_page + page) * grain),
             std::min(end, (first_page + end_page) * grain));
  });
}

}  // namespace recsdk::internal
