// A clock that moves when it is told to. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>

#include "server/broker/clock.h"

namespace weightbroker::testing {

class FakeClock : public Clock {
 public:
  std::chrono::system_clock::time_point WallNow() const override {
    return std::chrono::system_clock::time_point(std::chrono::seconds(1'700'000'000) + elapsed_.load());
  }
  std::chrono::steady_clock::time_point SteadyNow() const override {
    return std::chrono::steady_clock::time_point(std::chrono::hours(1) + elapsed_.load());
  }
  void Advance(std::chrono::milliseconds by) { elapsed_ = elapsed_.load() + by; }

 private:
  std::atomic<std::chrono::milliseconds> elapsed_{std::chrono::milliseconds(0)};
};

}  // namespace weightbroker::testing
