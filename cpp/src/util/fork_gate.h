// Keeps fork out while a background thread is inside locks that the child would find taken.
#pragma once

#include <shared_mutex>

namespace recsdk::internal {

/// Fork waits until nobody holds the returned lock. Take it before any lock of a table, and hold it
/// briefly.
std::shared_lock<std::shared_mutex> hold_off_fork();

}  // namespace recsdk::internal
