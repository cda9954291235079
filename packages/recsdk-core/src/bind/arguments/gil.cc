#include "arguments/gil.h"

#include <chrono>
#include <thread>

namespace recsdk::bind {

void stop_thread() noexcept {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace recsdk::bind
