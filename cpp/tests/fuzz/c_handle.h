// Handles of the C interfaces that free themselves.
#pragma once

#include <memory>

namespace recsdk::test {

/// A handle, freed by its own function.
template <typename T, void (*kFree)(T*)>
struct CHandle {
  struct Free {
    void operator()(T* handle) const { kFree(handle); }
  };
  std::unique_ptr<T, Free> owned;

  T* get() const { return owned.get(); }
};

}  // namespace recsdk::test
