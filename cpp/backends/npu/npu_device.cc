#include "backends/npu/npu_device.h"

#include <mutex>
#include <stdexcept>

#include "backends/npu/npu_stream.h"
#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

// Once for the process, which may have done it itself. It is not undone: the runtime must not be
// ended from a destructor, and may be in use beside us.
// Source: the restrictions of aclInit, aclFinalize and aclFinalizeReference.
void initialize(const acl::Library& library) {
  static std::mutex mutex;
  static bool is_done = false;
  const std::lock_guard lock(mutex);
  if (is_done) return;
  const acl::Status status = library.aclInit(nullptr);
  if (status != acl::kRepeatInitialize) library.check(status, "aclInit");
  is_done = true;
}

void check_ordinal(const acl::Library& library, int ordinal) {
  std::uint32_t count = 0;
  library.check(library.aclrtGetDeviceCount(&count), "aclrtGetDeviceCount");
  if (count == 0) {
    throw Error(ErrorCode::kBackendUnavailable,
                "backend 'npu' is not available: the runtime finds no device; see npu-smi info, "
                "and ASCEND_RT_VISIBLE_DEVICES");
  }
  if (ordinal < 0 || static_cast<std::uint32_t>(ordinal) >= count) {
    throw std::invalid_argument("device of backend 'npu' must be 0 to " +
                                std::to_string(count - 1) + ", got " + std::to_string(ordinal));
  }
}

// The calling thread's context; null if it has none, which is an error to the runtime.
acl::Context current_context(const acl::Library& library) {
  acl::Context context = nullptr;
  return library.aclrtGetCurrentContext(&context) == acl::kSuccess ? context : nullptr;
}

class NpuEvent final : public DeviceEvent {
 public:
  explicit NpuEvent(const acl::Library& library) : library_(library) {
    // Of the kind that may be recorded again and again, and waited for by streams.
    library.check(library.aclrtCreateEventExWithFlag(&event_, acl::kEventSync),
                  "aclrtCreateEventExWithFlag");
  }
  ~NpuEvent() override { library_.aclrtDestroyEvent(event_); }

  void synchronize() override {
    library_.check(library_.aclrtSynchronizeEvent(event_), "aclrtSynchronizeEvent");
  }
  acl::Event handle() const { return event_; }

 private:
  const acl::Library& library_;
  acl::Event event_ = nullptr;
};

}  // namespace

acl::Event handle_of(DeviceEvent& event) { return static_cast<NpuEvent&>(event).handle(); }

NpuDevice::NpuDevice(int ordinal) : library_(acl::library()), ordinal_(ordinal) {
  initialize(library_);
  check_ordinal(library_, ordinal);
  const acl::Context previous = current_context(library_);
  set_device();
  leave(previous);
}

// Counted by the runtime, so that it is in nobody's way.
void NpuDevice::set_device() {
  library_.check(library_.aclrtSetDevice(ordinal_), "aclrtSetDevice");
  const acl::Status status = library_.aclrtGetCurrentContext(&context_);
  if (status == acl::kSuccess) return;
  library_.aclrtResetDevice(ordinal_);
  library_.fail(status, "aclrtGetCurrentContext");
}

NpuDevice::~NpuDevice() { library_.aclrtResetDevice(ordinal_); }

void* NpuDevice::enter() {
  const acl::Context previous = current_context(library_);
  if (previous == context_) return nullptr;
  library_.check(library_.aclrtSetCurrentContext(context_), "aclrtSetCurrentContext");
  return previous;
}

void NpuDevice::leave(void* previous) noexcept {
  if (previous != nullptr) library_.aclrtSetCurrentContext(previous);
}

void* NpuDevice::allocate(std::size_t bytes) {
  void* memory = nullptr;
  const acl::Status status = library_.aclrtMalloc(&memory, bytes, acl::MemMallocPolicy::kHugeFirst);
  library_.check(status, ("aclrtMalloc of " + std::to_string(bytes) + " bytes").c_str());
  return memory;
}

void* NpuDevice::allocate_pinned(std::size_t bytes) {
  void* memory = nullptr;
  const acl::Status status = library_.aclrtMallocHost(&memory, bytes);
  library_.check(status, ("aclrtMallocHost of " + std::to_string(bytes) + " bytes").c_str());
  return memory;
}

// There is nothing to be done about memory that cannot be freed.
void NpuDevice::free(void* memory) noexcept { library_.aclrtFree(memory); }
void NpuDevice::free_pinned(void* memory) noexcept { library_.aclrtFreeHost(memory); }

std::unique_ptr<DeviceStream> NpuDevice::make_stream() {
  return std::make_unique<NpuStream>(*this);
}
std::unique_ptr<DeviceEvent> NpuDevice::make_event() {
  return std::make_unique<NpuEvent>(library_);
}

std::shared_ptr<Device> open_npu(int ordinal) { return std::make_shared<NpuDevice>(ordinal); }

}  // namespace recsdk::internal
