// What is handed to the devices, counted while somebody wants to know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace npusim {

struct Counts {
  std::map<std::string, std::int64_t> operators;  ///< by name; copies on a device are some
  std::int64_t waits = 0;                         ///< of the host for a device
  std::int64_t bytes_to_device = 0;
  std::int64_t bytes_to_host = 0;
  double seconds = 0;  ///< of processors, spent in the devices' place
};

/// Forgets what was counted, and counts from here on, or not.
void start_counting(bool is_wanted);
Counts counted();

void count_operator(const std::string& name);
void count_waits(std::int64_t number);
void count_copy(std::size_t bytes, bool to_device);

/// Counts the processor time of this thread while it lives: a device would have done the work.
class TimedWork {
 public:
  TimedWork();
  ~TimedWork();
  TimedWork(const TimedWork&) = delete;
  TimedWork& operator=(const TimedWork&) = delete;

 private:
  double begin_;
};

}  // namespace npusim
