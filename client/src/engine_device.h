// Where an engine computes, and whether weights lie there.
//
//   ASSIGN_OR_RETURN(const EngineDevice engine, FindEngineDevice(options.cuda_device));
//   RETURN_IF_ERROR(CheckLiesOn(engine, header.device()));
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_driver.h"

namespace weightbroker::client {

// A value; the driver is there for the life of the process.
struct EngineDevice {
  CudaDriver* driver = nullptr;  // null for an engine that computes on the host
  CudaDevice device = -1;        // as this process counts
  std::string uuid;              // empty on the host

  bool is_host() const { return driver == nullptr; }
  // As the service names devices: its UUID, or "host".
  std::string name() const { return is_host() ? "host" : uuid; }
};

// The GPU of number `cuda_device` in this process, or for -1 the host, which takes no driver. GPU_UNAVAILABLE,
// DRIVER_TOO_OLD; DEVICE_UNKNOWN, naming the GPUs that this process sees, if it has no GPU of that number.
absl::StatusOr<EngineDevice> FindEngineDevice(int cuda_device);
absl::StatusOr<EngineDevice> FindEngineDevice(CudaDriver& driver, int cuda_device);

// Ok if a shard that the service says is on `shard_device` (a GPU's UUID, or "host") is where the engine computes.
// DEVICE_MISMATCH naming both, and what this process sees of the shard's GPU.
absl::Status CheckLiesOn(const EngineDevice& engine, const std::string& shard_device);

}  // namespace weightbroker::client
