// From C++ time to protobuf's. Thread-safe.
#pragma once

#include <google/protobuf/timestamp.pb.h>

#include <chrono>

namespace weightbroker {

inline void SetTimestamp(std::chrono::system_clock::time_point time, google::protobuf::Timestamp* timestamp) {
  const int64_t nanos = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  timestamp->set_seconds(nanos / 1'000'000'000);
  timestamp->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

}  // namespace weightbroker
