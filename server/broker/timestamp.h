// From C++ time to protobuf's and back. Thread-safe.
#pragma once

#include <google/protobuf/timestamp.pb.h>

#include <algorithm>
#include <chrono>

namespace weightbroker {

inline void SetTimestamp(std::chrono::system_clock::time_point time, google::protobuf::Timestamp* timestamp) {
  const int64_t nanos = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  timestamp->set_seconds(nanos / 1'000'000'000);
  timestamp->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

// Of what SetTimestamp made, exactly; what is out of range of the clock comes out as some other time.
inline std::chrono::system_clock::time_point ToTimePoint(const google::protobuf::Timestamp& timestamp) {
  constexpr int64_t kMaxSeconds = 9'000'000'000;  // in nanoseconds still an int64
  const int64_t seconds = timestamp.seconds() < 0 ? 0 : std::min(timestamp.seconds(), kMaxSeconds);
  return std::chrono::system_clock::time_point(std::chrono::seconds(seconds) +
                                               std::chrono::nanoseconds(timestamp.nanos()));
}

}  // namespace weightbroker
