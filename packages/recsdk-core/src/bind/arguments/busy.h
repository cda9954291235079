// Calls that the engine refuses while batches are in flight, of which some may be nobody's.
#pragma once

#include <nanobind/nanobind.h>

#include "recsdk/error.h"

namespace recsdk::bind {

namespace nb = nanobind;

/// From now on Python's `function` lets go of batches that nobody can end any more, as a framework
/// keeps those of a backward that raised.
void set_drop_abandoned(nb::object function);

/// Calls it, if there is one. Returns whether batches have ended since.
bool drop_abandoned();

/// What counts the batches that end.
void note_ended() noexcept;

/// The call, which is made once more if the engine was busy and abandoned batches were let go of:
/// one of one table, which has then changed nothing.
template <typename Given, typename... Arguments>
auto dropping_abandoned(Given (*call)(Arguments...)) {
  return [call](Arguments... arguments) -> Given {
    try {
      return call(arguments...);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBusy || !drop_abandoned()) throw;
    }
    return call(arguments...);
  };
}

}  // namespace recsdk::bind
