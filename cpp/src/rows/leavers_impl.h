// The state behind a Leavers.
#pragma once

#include <memory>

#include "recsdk/leavers.h"
#include "rows/leaver_queue.h"

namespace recsdk {

struct Leavers::Impl {
  std::shared_ptr<internal::LeaverQueue> queue;
};

}  // namespace recsdk
