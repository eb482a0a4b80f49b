// Faults of GPUs as NVML would report them, when a test wants them. Thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "common/base/mutex.h"
#include "common/device/gpu_events.h"

namespace weightbroker::testing {

// What happens to the GPUs; a source reports it.
class GpuTrouble {
 public:
  void Happen(GpuEvent event) {
    MutexLock lock(mutex_);
    events_.push_back(std::move(event));
    changed_.NotifyAll();
  }

  std::optional<GpuEvent> Next(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (events_.empty() && std::chrono::steady_clock::now() < deadline) changed_.WaitUntil(mutex_, deadline);
    if (events_.empty()) return std::nullopt;
    GpuEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<GpuEvent> events_ ABSL_GUARDED_BY(mutex_);
};

class FakeGpuEvents : public GpuEventSource {
 public:
  explicit FakeGpuEvents(GpuTrouble* trouble) : trouble_(trouble) {}

  absl::StatusOr<std::optional<GpuEvent>> Wait(std::chrono::milliseconds timeout) override {
    return trouble_->Next(timeout);
  }

 private:
  GpuTrouble* const trouble_;
};

}  // namespace weightbroker::testing
