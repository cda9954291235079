// Devices, streams and events of the simulation.
//
// A stream is a queue of copies and waits, and a thread that runs them. It runs as late as it may:
// only when somebody waits for it. What a program forgot to wait for has then certainly not run.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace npusim {

/// Whether copies run later, on their stream's thread (RECSDK_SIM_NPU_ASYNC=1).
bool is_async();

/// Number of devices (RECSDK_SIM_NPU_DEVICES, by default 8).
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
/// Throws if there is no such device.
void set_device(c10::DeviceIndex device);

c10::Stream make_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream default_stream(c10::DeviceIndex device);
void set_current_stream(c10::Stream stream);

/// Memory that a task reads or writes.
struct Range {
  const void* begin = nullptr;
  std::size_t size = 0;
};

/// A place in a stream: behind the first `count` tasks.
struct Mark {
  c10::StreamId stream = 0;
  c10::DeviceIndex device = 0;
  std::uint64_t count = 0;
};

/// Queues a task that touches `device_memory` and maybe other memory, which it must keep alive.
void push(c10::Stream stream, Range device_memory, std::function<void()> act);
/// Queues a wait.
void push_wait(c10::Stream stream, Mark mark);
/// Runs `act` at once if that commutes with all that is queued, else queues it.
void run_or_push(c10::Stream stream, Range device_memory, std::function<void()> act);

Mark mark(c10::Stream stream);
bool is_reached(Mark mark);
/// Lets the stream run up to the mark, without waiting.
void request(Mark mark);
/// Lets the stream run up to the mark and waits for it.
void reach(Mark mark);

void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);
/// What every operator does first.
void drain_current_stream(c10::DeviceIndex device);

}  // namespace npusim
