// Device memory and pinned host memory: both are host memory, of known ranges.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace npusim {

/// Device memory, by blocks that belong to the stream that was current when they were allocated.
/// A freed block goes to the next allocation of its stream; asynchronously, it is poisoned first.
/// A block that other streams were recorded on is kept until they have passed that point.
/// Throws c10::OutOfMemoryError beyond RECSDK_SIM_NPU_MEMORY (such as 256M) per device.
c10::Allocator* device_allocator();

/// Page-locked host memory, as far as torch can tell.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

/// Keeps the block from being reused before `stream` has done what is queued when it is freed.
void record_stream(const c10::DataPtr& data, c10::Stream stream);

struct MemoryCounts {
  std::size_t allocated = 0;
  std::size_t reserved = 0;  ///< allocated, and kept for reuse
  std::size_t peak = 0;      ///< of allocated
  std::size_t limit = 0;     ///< 0: none
};
MemoryCounts memory_counts(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
/// Frees what is kept for reuse.
void empty_cache();

}  // namespace npusim
