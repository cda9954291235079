// Which operators make the host wait for the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace npusim {

/// How often the host waits in a call on cuda: for a size, a number or an error that the device
/// knows. `arguments`: as many as the operator has.
std::int64_t waits_of(const c10::OperatorHandle& op, const c10::IValue* arguments);

}  // namespace npusim
