// Random numbers: those of torch's CPU generator, kept per device.
#pragma once

#include <ATen/core/Generator.h>

namespace npusim {

at::Generator new_generator(c10::DeviceIndex device);
/// The CPU generator within a generator of the device.
at::Generator cpu_generator(const at::Generator& generator);
at::Generator default_cpu_generator(c10::DeviceIndex device);

}  // namespace npusim
