// The clock that all processes of a machine share and nobody sets: CLOCK_MONOTONIC.
#pragma once

#include <chrono>
#include <cstdint>

namespace weightbroker {

inline int64_t SteadyNanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace weightbroker
