#include "fake_acl/state.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace recsdk::fake {

thread_local acl::Context current_context = nullptr;

State& State::get() {
  static auto* const state = new State;  // never destroyed
  return *state;
}

Status State::begin(const char* call, bool needs_context) {
  ++num_calls;
  const bool fails = calls_to_failure == 0;
  if (calls_to_failure > 0 || (fails && !fails_for_good)) --calls_to_failure;
  if (fails) {
    if (failed_call.empty()) failed_call = call;
    return failure;
  }
  if (!is_initialized) {
    violate(std::string(call) + " before aclInit");
    return kUninitialized;
  }
  if (needs_context && current_context == nullptr) {
    violate(std::string(call) + " without a context in the thread");
    return kContextNull;
  }
  return acl::kSuccess;
}

Status State::violate(const std::string& what) {
  violations.push_back(what);
  return kInvalidParam;
}

Block* State::find(const char* call, const void* address, std::size_t size, bool is_device) {
  const auto* const begin = static_cast<const std::byte*>(address);
  auto found = blocks.upper_bound(begin);
  if (found != blocks.begin()) {
    Block& block = (--found)->second;
    if (begin + size <= block.user + block.size && block.is_device == is_device) return &block;
  }
  violate(std::string(call) + (is_device ? " of no device memory" : " of no pinned memory"));
  return nullptr;
}

void* State::seen_by_device(const void* address) {
  const auto* const begin = static_cast<const std::byte*>(address);
  const Block& block = (--blocks.upper_bound(begin))->second;
  return block.device + (begin - block.user);
}

void State::submit(Stream& stream, std::vector<const void*> used, std::function<void()> run) {
  stream.tasks.push_back({++stream.submitted, std::move(used), std::move(run)});
  if (is_eager) stream.released = stream.submitted;
  changed.notify_all();
}

void State::wait(std::unique_lock<std::mutex>& lock, Stream& stream, std::uint64_t number) {
  stream.released = std::max(stream.released, number);
  changed.notify_all();
  changed.wait(lock, [&] { return stream.done >= number; });
  for (auto& [address, block] : blocks) {
    const auto is_over = [&](const Pending& copy) {
      return copy.stream == &stream && copy.number <= number;
    };
    if (std::erase_if(block.pending, is_over) != 0) protect(block);
  }
}

bool State::is_used(const void* block) const {
  for (const auto& [handle, stream] : streams) {
    for (const Task& task : stream->tasks) {
      if (std::find(task.blocks.begin(), task.blocks.end(), block) != task.blocks.end())
        return true;
    }
  }
  return false;
}

// Device memory is out of the host's reach; of pinned memory, what copies need.
void State::protect(Block& block) {
  int access = PROT_READ | PROT_WRITE;
  for (const Pending& copy : block.pending) access &= copy.writes_block ? PROT_NONE : PROT_READ;
  mprotect(block.user, block.mapped, block.is_device ? PROT_NONE : access);
}

}  // namespace recsdk::fake
