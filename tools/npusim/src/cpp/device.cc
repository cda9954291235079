// What torch asks of a device: guards, streams, events, hooks, random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>
#include <vector>

#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace npusim {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_at(c10::DeviceIndex index) { return {kType, index}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) set_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*priority*/) const override {
    return make_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return make_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return query(mark(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && is_async()) push_wait(stream, *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Mark*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && is_async()) reach(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Mark*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

 private:
  /// A stream that is asked whether it is done begins to run, so that loops over this end.
  static bool query(Mark mark) {
    if (is_reached(mark)) return true;
    request(mark);
    return false;
  }
};

/// Random numbers of torch's CPU generator, under the device's name.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex index, at::Generator state)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(state)) {}

  void set_current_seed(std::uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { inner.set_offset(offset); }
  std::uint64_t get_offset() const override { return inner.get_offset(); }
  std::uint64_t current_seed() const override { return inner.current_seed(); }
  std::uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), inner.clone());
  }

  at::Generator inner;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* made = [] {
    auto* generators = new std::vector<at::Generator>;
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      generators->push_back(new_generator(device));
    }
    return generators;
  }();
  return made->at(static_cast<std::size_t>(index < 0 ? current_device() : index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return device_at(current_device()); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    drain_current_stream(storage.device().index());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(kType, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

at::Generator default_cpu_generator(c10::DeviceIndex device) {
  return cpu_generator(default_generator(device));
}

}  // namespace npusim
