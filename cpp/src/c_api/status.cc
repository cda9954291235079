#include "c_api/status.h"

#include "util/last_message.h"

namespace recsdk::c_api {
namespace {

thread_local internal::LastMessage last_message;

}  // namespace

int fail(ErrorCode code, const char* message) noexcept {
  last_message.set(message);
  return static_cast<int>(code);
}

}  // namespace recsdk::c_api

const char* recsdk_last_error_message(void) { return recsdk::c_api::last_message.text(); }
