// What tests tell the stand-in, and ask it.
#include <string>
#include <utility>

#include "fake_acl/fake_acl.h"
#include "fake_acl/state.h"

namespace recsdk::fake {
namespace {

void count(std::string& text, std::size_t number, const char* what) {
  if (number == 0) return;
  if (!text.empty()) text += ", ";
  text += std::to_string(number) + " of " + what;
}

}  // namespace
}  // namespace recsdk::fake

using namespace recsdk::fake;  // NOLINT(google-build-using-namespace)

extern "C" {

void fake_acl_reset(FakeAclWork work) {
  State& state = State::get();
  const Lock lock(state.mutex);
  state.is_eager = work == kFakeAclEager;
  state.violations.clear();
  state.num_calls = 0;
  state.calls_to_failure = -1;
  state.failed_call.clear();
  state.memory_limit = 0;
  state.num_devices = 1;
}

const char* fake_acl_violations() {
  static std::string text;
  State& state = State::get();
  const Lock lock(state.mutex);
  text.clear();
  for (const std::string& line : state.violations) text += line + "\n";
  return text.c_str();
}

const char* fake_acl_live() {
  static std::string text;
  State& state = State::get();
  const Lock lock(state.mutex);
  text.clear();
  std::size_t num_device = 0;
  for (const auto& [address, block] : state.blocks) num_device += block.is_device ? 1U : 0U;
  count(text, num_device, "device memory");
  count(text, state.blocks.size() - num_device, "pinned memory");
  count(text, state.streams.size(), "streams");
  count(text, state.events.size(), "events");
  count(text, state.tensors.size(), "tensors");
  count(text, state.scalars.size(), "scalars");
  count(text, state.int_arrays.size(), "arrays");
  count(text, state.executors.size(), "executors");
  count(text, state.device_uses.size(), "devices");
  return text.c_str();
}

std::int64_t fake_acl_num_calls() {
  State& state = State::get();
  const Lock lock(state.mutex);
  return state.num_calls;
}

void fake_acl_fail(std::int64_t n, int status, bool for_good) {
  State& state = State::get();
  const Lock lock(state.mutex);
  state.calls_to_failure = n;
  state.failure = status;
  state.fails_for_good = for_good;
  state.failed_call.clear();
}

const char* fake_acl_failed_call() {
  static std::string text;
  State& state = State::get();
  const Lock lock(state.mutex);
  text = state.failed_call;
  return text.c_str();
}

void fake_acl_limit_memory(std::size_t bytes) {
  State& state = State::get();
  const Lock lock(state.mutex);
  state.memory_limit = bytes == 0 ? 0 : state.memory_used + bytes;
}

void fake_acl_set_num_devices(std::uint32_t count) {
  State& state = State::get();
  const Lock lock(state.mutex);
  state.num_devices = count;
}

std::int64_t fake_acl_num_done() {
  State& state = State::get();
  const Lock lock(state.mutex);
  return state.num_done;
}

std::int64_t fake_acl_num_waiting() {
  State& state = State::get();
  const Lock lock(state.mutex);
  std::size_t number = 0;
  for (const auto& [handle, stream] : state.streams) number += stream->tasks.size();
  return static_cast<std::int64_t>(number);
}

}  // extern "C"
