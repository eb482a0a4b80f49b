// What the driver says of GPUs that fail: XID errors and uncorrectable ECC errors, from NVML, which needs no CUDA
// context.
//
//   auto events = OpenNvmlEvents();
//   if (!events.ok()) return events.status();            // GPU_UNAVAILABLE: no driver, or none with events
//   ASSIGN_OR_RETURN(const std::optional<GpuEvent> event, (*events)->Wait(std::chrono::seconds(1)));
//   if (event.has_value() && MeansDamage(*event)) ...
//
// Wait is for one thread. tests/support/fake_gpu_events.h has an implementation that says what a test wants.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace weightbroker {

struct GpuEvent {
  enum class Kind {
    kXid,
    kDoubleBitEcc,
  };
  Kind kind = Kind::kXid;
  std::string uuid;  // empty if the driver does not say which GPU: then it may be any
  uint64_t xid = 0;  // of kXid
};

// "xid" or "double_bit_ecc".
std::string GpuEventKindName(GpuEvent::Kind kind);

// Whether what lies in the GPU's memory can no longer be relied on. Every uncorrectable ECC error says so, and every
// XID (48, 62 to 64, 74, 79, 92, 94, 95, 119, 120, ... and those to come) but the six that a program's own fault
// causes: 13, 31, 43, 45, 68 and 109.
bool MeansDamage(const GpuEvent& event);

class GpuEventSource {
 public:
  virtual ~GpuEventSource() = default;

  // The next event, or nothing within `timeout`. CUDA_ERROR if NVML fails.
  virtual absl::StatusOr<std::optional<GpuEvent>> Wait(std::chrono::milliseconds timeout) = 0;

  // GPUs whose events are not reported, by UUID, separated by commas; empty if there are none.
  virtual std::string unwatched() const { return ""; }
};

// GPU_UNAVAILABLE if there is no libnvidia-ml.so.1, it cannot be initialized, or no GPU has events, saying what it
// said.
absl::StatusOr<std::unique_ptr<GpuEventSource>> OpenNvmlEvents();

}  // namespace weightbroker
