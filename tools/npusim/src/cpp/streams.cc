#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace npusim {
namespace {

constexpr int kMostDevices = 64;
constexpr int kUsualDevices = 8;

struct Task {
  std::function<void()> act;
  Range memory;
  bool is_wait = false;
};

bool overlap(const Range& one, const Range& other) {
  const auto* first = static_cast<const char*>(one.begin);
  const auto* second = static_cast<const char*>(other.begin);
  return first < second + other.size && second < first + one.size;
}

/// The tasks of one stream. Its thread never ends, so a queue is never destroyed.
class Queue {
 public:
  std::uint64_t pushed() const {
    const std::lock_guard lock(mutex_);
    return done_ + tasks_.size();
  }

  bool is_done(std::uint64_t count) const {
    const std::lock_guard lock(mutex_);
    return done_ >= count;
  }

  void push(Task task) {
    forget_spent();
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    start();
  }

  /// Whether memory may be touched now as if it were touched behind all that is queued.
  bool commutes_with(const Range& memory) const {
    const std::lock_guard lock(mutex_);
    return std::none_of(tasks_.begin(), tasks_.end(), [&](const Task& task) {
      return task.is_wait || overlap(task.memory, memory);
    });
  }

  void request(std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    wanted_ = std::max(wanted_, count);
    changed_.notify_all();
  }

  void reach(std::uint64_t count) {
    request(count);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return done_ >= count; });
    }
    forget_spent();
  }

 private:
  /// With the lock held.
  void start() {
    if (has_thread_) return;
    has_thread_ = true;
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return done_ < wanted_ && !tasks_.empty(); });
      const Task& task = tasks_.front();  // it stays in place: others see what it touches
      lock.unlock();
      task.act();
      lock.lock();
      spent_.push_back(std::move(tasks_.front()));
      tasks_.pop_front();
      ++done_;
      changed_.notify_all();
    }
  }

  /// Destroys tasks that have run, on a caller's thread: what they keep alive may belong to Python.
  void forget_spent() {
    std::vector<Task> spent;
    const std::lock_guard lock(mutex_);
    spent.swap(spent_);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<Task> spent_;
  std::uint64_t done_ = 0;
  std::uint64_t wanted_ = 0;
  bool has_thread_ = false;
};

using Name = std::pair<c10::DeviceIndex, c10::StreamId>;

struct Registry {
  std::mutex mutex;
  std::map<Name, Queue*> queues;
  c10::StreamId next_stream = 1;
};

Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

Queue& queue_of(c10::DeviceIndex device, c10::StreamId stream) {
  const std::lock_guard lock(registry().mutex);
  Queue*& queue = registry().queues[{device, stream}];
  if (queue == nullptr) queue = new Queue;
  return *queue;
}

Queue& queue_of(c10::Stream stream) { return queue_of(stream.device_index(), stream.id()); }
Queue& queue_of(const Mark& mark) { return queue_of(mark.device, mark.stream); }

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

thread_local c10::DeviceIndex tls_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> tls_streams{};

c10::StreamId& current_id(c10::DeviceIndex device) {
  return tls_streams.at(static_cast<std::size_t>(device < 0 ? tls_device : device));
}

}  // namespace

bool is_async() {
  static const bool value = [] {
    const char* text = std::getenv("RECSDK_SIM_NPU_ASYNC");
    return text != nullptr && std::string_view(text) == "1";
  }();
  return value;
}

c10::DeviceIndex device_count() {
  static const auto value = [] {
    const char* text = std::getenv("RECSDK_SIM_NPU_DEVICES");
    const int given = text == nullptr ? kUsualDevices : std::atoi(text);
    return static_cast<c10::DeviceIndex>(std::clamp(given, 1, kMostDevices));
  }();
  return value;
}

c10::DeviceIndex current_device() { return tls_device; }

void set_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "npu:", static_cast<int>(device),
              " does not exist: the simulation has ", static_cast<int>(device_count()),
              " devices; set RECSDK_SIM_NPU_DEVICES");
  tls_device = device;
}

c10::Stream make_stream(c10::DeviceIndex device) {
  const std::lock_guard lock(registry().mutex);
  return stream_of(device < 0 ? tls_device : device, registry().next_stream++);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device < 0 ? tls_device : device, current_id(device));
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return stream_of(device < 0 ? tls_device : device, 0);
}

void set_current_stream(c10::Stream stream) { current_id(stream.device_index()) = stream.id(); }

void push(c10::Stream stream, Range device_memory, std::function<void()> act) {
  queue_of(stream).push({std::move(act), device_memory});
}

void push_wait(c10::Stream stream, Mark mark) {
  const bool is_same = mark.stream == stream.id() && mark.device == stream.device_index();
  if (is_same || is_reached(mark)) return;
  queue_of(stream).push({[mark] { reach(mark); }, {}, true});
}

void run_or_push(c10::Stream stream, Range device_memory, std::function<void()> act) {
  if (queue_of(stream).commutes_with(device_memory)) {
    act();
  } else {
    push(stream, device_memory, std::move(act));
  }
}

Mark mark(c10::Stream stream) {
  return {stream.id(), stream.device_index(), queue_of(stream).pushed()};
}

bool is_reached(Mark mark) { return queue_of(mark).is_done(mark.count); }
void request(Mark mark) { queue_of(mark).request(mark.count); }
void reach(Mark mark) { queue_of(mark).reach(mark.count); }

void synchronize(c10::Stream stream) {
  if (is_async()) reach(mark(stream));
}

void synchronize_device(c10::DeviceIndex device) {
  if (!is_async()) return;
  const c10::DeviceIndex wanted = device < 0 ? tls_device : device;
  std::vector<Mark> marks;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& [name, queue] : registry().queues) {
      if (name.first == wanted) marks.push_back({name.second, name.first, queue->pushed()});
    }
  }
  for (const Mark& each : marks) reach(each);
}

void drain_current_stream(c10::DeviceIndex device) {
  if (is_async()) synchronize(current_stream(device));
}

}  // namespace npusim
