// What Health reports of the machine, read at most once a second: reading it means a handful of files in /proc and
// /sys, questions to the GPUs' driver and a sweep over every connection, and Health is what load balancers and people
// call most.
//
// Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "common/base/mutex.h"
#include "server/broker/clock.h"
#include "server/broker/device_catalog.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

class HealthFacts {
 public:
  struct Facts {
    int64_t available_bytes = 0;
    int open_connections = 0;
    v1::PageKind host_page_kind = v1::PAGE_KIND_BASE;
    GpuReport gpus = {};
  };

  // `clock` must outlive this object.
  HealthFacts(const Clock& clock, std::function<Facts()> read) : clock_(clock), read_(std::move(read)) {}

  // At most a second old. It may read them, and a driver may take its time: for threads that can wait.
  Facts Get();

  // The same if they have been read already; never waits.
  std::optional<Facts> Fresh() const;

 private:
  const Clock& clock_;
  const std::function<Facts()> read_;

  Mutex reading_;  // held while they are read, by one thread for all
  mutable Mutex mutex_;
  std::optional<Facts> facts_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point read_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker
