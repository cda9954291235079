#include "io/block_memory.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "recsdk/row_file.h"

namespace recsdk::internal {

BlockMemory::BlockMemory() : free_(new Free{getpid(), {}, {}}) {}

std::shared_ptr<std::byte[]> BlockMemory::take(std::int64_t bytes) {
  auto pages = std::make_unique<Pages>();
  {
    const std::lock_guard lock(free_->mutex);
    for (Pages& one : free_->pages) {
      if (pages->size() == 0) *pages = std::move(one);
    }
  }
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  if (pages->size() < size) *pages = Pages(size, 0);
  std::byte* const data = pages->data();
  return {data, [free = free_, owned = pages.release()](std::byte*) {
            const std::unique_ptr<Pages> given(owned);
            give_back(*free, std::move(*given));
          }};
}

void BlockMemory::give_back(Free& free, Pages pages) noexcept {
  constexpr std::size_t kUsual = kMaxWrittenBlockBytes + (std::size_t{2} << 20);
  if (pages.size() > kUsual || free.process != getpid()) return;
  const std::lock_guard lock(free.mutex);
  for (Pages& one : free.pages) {
    if (one.size() == 0) {
      one = std::move(pages);
      return;
    }
  }
}

}  // namespace recsdk::internal
