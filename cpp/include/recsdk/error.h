// Errors of the engine. Caller mistakes throw std::invalid_argument; everything else throws Error,
// or std::bad_alloc where the C++ library has no memory. A call that throws has changed nothing but
// spare capacity.
#pragma once

#include <stdexcept>
#include <string>

#include "recsdk/export.h"

namespace recsdk {

/// Stable codes, equal to those of the C ABI.
enum class ErrorCode : int {
  kInvalidArgument = 1,     ///< a caller mistake (thrown as std::invalid_argument)
  kOutOfMemory = 2,         ///< the operating system gave no memory
  kCapacity = 3,            ///< a fixed limit was reached
  kBusy = 4,                ///< not now: a batch, lease, cut or callback is under way, see the call
  kNonFinite = 5,           ///< a gradient was not finite and the table raises on that
  kBackendUnavailable = 6,  ///< the backend is not there
  kInternal = 7,            ///< a broken invariant or a failing callback
  kCheckpoint = 8,          ///< a checkpoint is damaged, does not fit, or cannot be written
  kDevice = 9,              ///< a call of a device's runtime failed
};

/// A run-time condition: nothing is wrong with the arguments by themselves.
class RECSDK_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace recsdk
