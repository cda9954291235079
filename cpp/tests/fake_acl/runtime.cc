// The runtime's functions: devices, contexts, memory, copies, streams, events.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "fake_acl/state.h"

namespace recsdk::fake {
namespace {

constexpr std::size_t kPage = 4096;
int device_numbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};

std::byte* map(int file, std::size_t size) {
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

Status allocate(State& state, void** memory, std::size_t size, bool is_device) {
  if (size == 0) return state.violate("an allocation of 0 bytes");
  const bool is_too_much = state.memory_limit != 0 && state.memory_used + size > state.memory_limit;
  if (is_device && is_too_much) return acl::kRtMemoryAllocation;
  Block block;
  block.is_device = is_device;
  block.size = size;
  block.mapped = (size + kPage - 1) / kPage * kPage;
  const int file = memfd_create("fake_acl", 0);
  const bool has_room = file >= 0 && ftruncate(file, static_cast<off_t>(block.mapped)) == 0;
  if (has_room) block.device = map(file, block.mapped);
  if (block.device != nullptr) block.user = map(file, block.mapped);
  if (file >= 0) close(file);
  if (block.user == nullptr) return acl::kRtMemoryAllocation;
  std::memset(block.device, 0xFF, block.mapped);
  state.protect(block);
  if (is_device) state.memory_used += size;
  *memory = block.user;
  state.blocks.emplace(block.user, std::move(block));
  return acl::kSuccess;
}

Status release(State& state, const char* call, void* memory, bool is_device) {
  const auto found = state.blocks.find(static_cast<std::byte*>(memory));
  if (found == state.blocks.end() || found->second.is_device != is_device)
    return state.violate(std::string(call) + " of an address that was not allocated");
  Block& block = found->second;
  if (state.is_used(block.user)) state.violate(std::string(call) + " of memory that work needs");
  if (!block.pending.empty())
    state.violate(std::string(call) + " of memory whose copy was not synchronized");
  if (is_device) state.memory_used -= block.size;
  munmap(block.user, block.mapped);
  munmap(block.device, block.mapped);
  state.blocks.erase(found);
  return acl::kSuccess;
}

Stream* find_stream(State& state, const char* call, acl::Stream handle) {
  const auto found = state.streams.find(static_cast<Stream*>(handle));
  if (found == state.streams.end()) {
    state.violate(std::string(call) + " of a stream that does not exist");
    return nullptr;
  }
  if (found->second->context != current_context)
    state.violate(std::string(call) + " of a stream of another context");
  return found->second.get();
}

Event* find_event(State& state, const char* call, acl::Event handle) {
  const auto found = state.events.find(static_cast<Event*>(handle));
  if (found != state.events.end()) return found->second.get();
  state.violate(std::string(call) + " of an event that does not exist");
  return nullptr;
}

// The thread of a stream.
void work(Stream& stream) {
  State& state = State::get();
  Lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] {
      return stream.stops ||
             (!stream.tasks.empty() && stream.tasks.front().number <= stream.released);
    });
    if (stream.stops) return;
    const std::uint64_t number = stream.tasks.front().number;
    const std::function<void()> run = stream.tasks.front().run;
    lock.unlock();
    run();
    lock.lock();
    stream.tasks.pop_front();  // only now: until then it needs its memory
    stream.done = number;
    ++state.num_done;
    state.changed.notify_all();
  }
}

void stop(State& state, Lock& lock, Stream& stream) {
  stream.stops = true;
  state.changed.notify_all();
  lock.unlock();
  stream.thread.join();
  lock.lock();
  for (auto& [address, block] : state.blocks) {
    std::erase_if(block.pending, [&](const Pending& copy) { return copy.stream == &stream; });
    state.protect(block);
  }
  for (auto& [handle, event] : state.events) {
    if (event->stream == &stream) event->stream = nullptr;
  }
  state.streams.erase(&stream);
}

bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0;
}

}  // namespace
}  // namespace recsdk::fake

using namespace recsdk::fake;  // NOLINT(google-build-using-namespace)

extern "C" {

FAKE_ACL_API Status aclInit(const char*) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const bool was_initialized = std::exchange(state.is_initialized, true);
  const Status status = state.begin("aclInit", false);
  if (status != acl::kSuccess) {
    state.is_initialized = was_initialized;
    return status;
  }
  return was_initialized ? acl::kRepeatInitialize : acl::kSuccess;
}

FAKE_ACL_API const char* aclGetRecentErrMsg() { return "the stand-in says no"; }

FAKE_ACL_API Status aclrtGetDeviceCount(std::uint32_t* count) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtGetDeviceCount", false)) return status;
  *count = state.num_devices;
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtSetDevice(std::int32_t device) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtSetDevice", false)) return status;
  if (device < 0 || static_cast<std::uint32_t>(device) >= state.num_devices)
    return state.violate("aclrtSetDevice of a device that does not exist");
  ++state.device_uses[device];
  current_context = &device_numbers[device];
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtResetDevice(std::int32_t device) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclrtResetDevice", false);
  if (--state.device_uses[device] < 0) state.violate("aclrtResetDevice more often than set");
  if (state.device_uses[device] > 0) return status;
  state.device_uses.erase(device);
  for (const auto& [handle, stream] : state.streams) {
    if (stream->context == &device_numbers[device])
      state.violate("aclrtResetDevice while a stream is left");
  }
  if (current_context == &device_numbers[device]) current_context = nullptr;
  return status;
}

FAKE_ACL_API Status aclrtGetCurrentContext(acl::Context* context) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtGetCurrentContext", false)) return status;
  *context = current_context;
  return current_context == nullptr ? kContextNull : acl::kSuccess;
}

FAKE_ACL_API Status aclrtSetCurrentContext(acl::Context context) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtSetCurrentContext", false)) return status;
  if (context == nullptr) return state.violate("aclrtSetCurrentContext of null");
  if (!state.device_uses.contains(*static_cast<int*>(context)))
    return state.violate("aclrtSetCurrentContext of a device that was reset");
  current_context = context;
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtMalloc(void** memory, std::size_t size, acl::MemMallocPolicy) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtMalloc")) return status;
  return allocate(state, memory, size, true);
}

FAKE_ACL_API Status aclrtFree(void* memory) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclrtFree");
  const Status released = release(state, "aclrtFree", memory, true);
  return status == acl::kSuccess ? released : status;
}

FAKE_ACL_API Status aclrtMallocHost(void** memory, std::size_t size) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtMallocHost")) return status;
  return allocate(state, memory, size, false);
}

FAKE_ACL_API Status aclrtFreeHost(void* memory) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclrtFreeHost");
  const Status released = release(state, "aclrtFreeHost", memory, false);
  return status == acl::kSuccess ? released : status;
}

FAKE_ACL_API Status aclrtMemcpyAsync(void* to, std::size_t to_size, const void* from,
                                     std::size_t size, acl::MemcpyKind kind, acl::Stream handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtMemcpyAsync")) return status;
  Stream* const stream = find_stream(state, "aclrtMemcpyAsync", handle);
  const bool goes_up = kind == acl::MemcpyKind::kHostToDevice;
  Block* const target = state.find("aclrtMemcpyAsync to", to, size, goes_up);
  Block* const source = state.find("aclrtMemcpyAsync from", from, size, !goes_up);
  if (stream == nullptr || target == nullptr || source == nullptr) return kInvalidParam;
  if (!is_aligned(to) || !is_aligned(from))
    return state.violate("aclrtMemcpyAsync of addresses that are not 64-byte aligned");
  if (size > to_size) return state.violate("aclrtMemcpyAsync of more than there is room for");
  void* const device_to = state.seen_by_device(to);
  const void* const device_from = state.seen_by_device(from);
  state.submit(*stream, {target->user, source->user},
               [device_to, device_from, size] { std::memcpy(device_to, device_from, size); });
  Block& pinned = goes_up ? *source : *target;
  pinned.pending.push_back({stream, stream->submitted, !goes_up});
  state.protect(pinned);
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtCreateStream(acl::Stream* handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtCreateStream")) return status;
  auto stream = std::make_unique<Stream>();
  stream->context = current_context;
  stream->thread = std::thread([made = stream.get()] { work(*made); });
  *handle = stream.get();
  state.streams.emplace(stream.get(), std::move(stream));
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtDestroyStream(acl::Stream handle) {
  State& state = State::get();
  Lock lock(state.mutex);
  const Status status = state.begin("aclrtDestroyStream");
  Stream* const stream = find_stream(state, "aclrtDestroyStream", handle);
  if (stream == nullptr) return kInvalidParam;
  if (!stream->tasks.empty()) state.violate("aclrtDestroyStream before its work was done");
  stop(state, lock, *stream);
  return status;
}

FAKE_ACL_API Status aclrtDestroyStreamForce(acl::Stream handle) {
  State& state = State::get();
  Lock lock(state.mutex);
  const Status status = state.begin("aclrtDestroyStreamForce");
  Stream* const stream = find_stream(state, "aclrtDestroyStreamForce", handle);
  if (stream == nullptr) return kInvalidParam;
  stop(state, lock, *stream);
  return status;
}

FAKE_ACL_API Status aclrtSynchronizeStream(acl::Stream handle) {
  State& state = State::get();
  Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtSynchronizeStream")) return status;
  Stream* const stream = find_stream(state, "aclrtSynchronizeStream", handle);
  if (stream == nullptr) return kInvalidParam;
  state.wait(lock, *stream, stream->submitted);
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtCreateEventExWithFlag(acl::Event* handle, std::uint32_t flag) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtCreateEventExWithFlag")) return status;
  auto event = std::make_unique<Event>();
  event->flag = flag;
  *handle = event.get();
  state.events.emplace(event.get(), std::move(event));
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtDestroyEvent(acl::Event handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  const Status status = state.begin("aclrtDestroyEvent");
  Event* const event = find_event(state, "aclrtDestroyEvent", handle);
  if (event == nullptr) return kInvalidParam;
  state.events.erase(event);
  return status;
}

FAKE_ACL_API Status aclrtRecordEvent(acl::Event handle, acl::Stream stream_handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtRecordEvent")) return status;
  Event* const event = find_event(state, "aclrtRecordEvent", handle);
  Stream* const stream = find_stream(state, "aclrtRecordEvent", stream_handle);
  if (event == nullptr || stream == nullptr) return kInvalidParam;
  event->stream = stream;
  event->number = stream->submitted;
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtStreamWaitEvent(acl::Stream stream_handle, acl::Event handle) {
  State& state = State::get();
  const Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtStreamWaitEvent")) return status;
  Event* const event = find_event(state, "aclrtStreamWaitEvent", handle);
  Stream* const stream = find_stream(state, "aclrtStreamWaitEvent", stream_handle);
  if (event == nullptr || stream == nullptr) return kInvalidParam;
  if (event->flag != acl::kEventSync)
    return state.violate("aclrtStreamWaitEvent of an event that is not for streams");
  if (event->stream == nullptr || event->stream == stream) return acl::kSuccess;
  state.submit(*stream, {}, [other = event->stream, number = event->number] {
    State& known = State::get();
    Lock waiting(known.mutex);
    other->released = std::max(other->released, number);
    known.changed.notify_all();
    known.changed.wait(waiting, [&] { return other->done >= number; });
  });
  return acl::kSuccess;
}

FAKE_ACL_API Status aclrtSynchronizeEvent(acl::Event handle) {
  State& state = State::get();
  Lock lock(state.mutex);
  if (const Status status = state.begin("aclrtSynchronizeEvent")) return status;
  Event* const event = find_event(state, "aclrtSynchronizeEvent", handle);
  if (event == nullptr) return kInvalidParam;
  if (event->stream != nullptr) state.wait(lock, *event->stream, event->number);
  return acl::kSuccess;
}

}  // extern "C"
