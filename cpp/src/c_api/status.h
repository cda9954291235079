// Turns exceptions into status codes: the only place of the C interface that catches.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>

#include "recsdk/c_api.h"
#include "recsdk/error.h"

namespace recsdk::c_api {

/// Keeps the message for recsdk_last_error_message of this thread; returns the code. Allocates
/// nothing.
int fail(ErrorCode code, const char* message) noexcept;

/// Runs body() and turns what it throws into a status.
template <typename Body>
int guarded(Body&& body) noexcept {
  try {
    body();
    return RECSDK_OK;
  } catch (const Error& error) {
    return fail(error.code(), error.what());
  } catch (const std::invalid_argument& error) {
    return fail(ErrorCode::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::kOutOfMemory, "out of memory; free some or make the call smaller");
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, error.what());
  } catch (...) {
    return fail(ErrorCode::kInternal, "a callback threw something that is not a std::exception");
  }
}

}  // namespace recsdk::c_api
