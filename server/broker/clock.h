// The time, behind an interface: wall-clock for what people read, steady for durations. Thread-safe.
#pragma once

#include <chrono>

namespace weightbroker {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::chrono::system_clock::time_point WallNow() const = 0;
  virtual std::chrono::steady_clock::time_point SteadyNow() const = 0;
};

// The operating system's. Never deleted.
const Clock& RealClock();

}  // namespace weightbroker
