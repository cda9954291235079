// The host as a device: its memory is the host's, and its streams do their work at once.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace recsdk::internal {

/// There is one, 0.
std::shared_ptr<Device> open_cpu(int ordinal);

}  // namespace recsdk::internal
