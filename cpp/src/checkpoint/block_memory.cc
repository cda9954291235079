#include "checkpoint/block_memory.h"

#include <utility>

#include "recsdk/row_file.h"

namespace recsdk::internal {

std::shared_ptr<std::byte[]> BlockMemory::take(std::int64_t bytes) {
  std::unique_ptr<Buffer<std::byte>> buffer;
  {
    const std::lock_guard lock(free_->mutex);
    for (auto& one : free_->buffers) {
      if (buffer == nullptr) buffer.swap(one);
    }
  }
  if (buffer == nullptr) buffer = std::make_unique<Buffer<std::byte>>();
  buffer->resize(bytes);
  std::byte* const data = buffer->data();
  return {data, [free = free_, owned = buffer.release()](std::byte*) {
            give_back(*free, std::unique_ptr<Buffer<std::byte>>(owned));
          }};
}

void BlockMemory::give_back(Free& free, std::unique_ptr<Buffer<std::byte>> buffer) noexcept {
  constexpr std::int64_t kUsual = kMaxWrittenBlockBytes + (std::int64_t{1} << 20);
  if (buffer->capacity() > kUsual) return;
  const std::lock_guard lock(free.mutex);
  for (auto& one : free.buffers) {
    if (one == nullptr) return one.swap(buffer);
  }
}

}  // namespace recsdk::internal
