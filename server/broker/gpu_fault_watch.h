// Watches for GPUs that fail, in a thread of its own.
//
//   GpuFaultWatch watch(OpenNvmlEvents, [](const GpuEvent& event) { ... });
//
// Where faults cannot be watched one line in the log says so, and `unwatched` does from then on. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "common/device/gpu_events.h"

namespace weightbroker {

class GpuFaultWatch {
 public:
  using Open = std::function<absl::StatusOr<std::unique_ptr<GpuEventSource>>()>;

  // Does nothing, and is not unwatched, without `open` or where that gives no source: there is no GPU to watch then.
  // `on_fault` is called from the watch's thread for each event that means damage.
  GpuFaultWatch(Open open, std::function<void(const GpuEvent&)> on_fault);
  ~GpuFaultWatch();
  GpuFaultWatch(const GpuFaultWatch&) = delete;
  GpuFaultWatch& operator=(const GpuFaultWatch&) = delete;

  // Whether faults of any GPU would not be noticed.
  bool unwatched() const { return unwatched_; }

 private:
  void Run();
  void GiveUp(const absl::Status& why);
  void OnEvent(const GpuEvent& event);

  const Open open_;
  const std::function<void(const GpuEvent&)> on_fault_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> unwatched_{false};
  std::thread thread_;
};

}  // namespace weightbroker
