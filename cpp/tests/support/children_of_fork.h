// Children of fork, for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "recsdk/export.h"

#if defined(__SANITIZE_THREAD__)
// A child that makes threads is what is tested.
extern "C" RECSDK_API const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace recsdk::test {

/// The exit status of a child that runs body(), which says whether all is well; killed if it hangs.
inline int status_of_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    bool is_well = false;
    try {
      is_well = body();
    } catch (...) {
    }
    _exit(is_well ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace recsdk::test
