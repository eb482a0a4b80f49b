// Room on a GPU for weights that this process is about to load for itself, asked for before anything is loaded: a GPU
// that is full of the same weights in a service's hands is the usual reason why there is none.
//
//   RETURN_IF_ERROR(MakeRoomOnGpu(context, uuid, need_bytes, {.service = connection, .inventory = nvml}));
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/src/connection.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_inventory.h"

namespace weightbroker::client {

struct RoomOptions {
  const Connection* service = nullptr;  // null: no service may hold anything there
  bool evict = false;                   // whether the service is to let go of what nobody holds
  GpuInventory* inventory = nullptr;    // null: who else uses the GPU is not known
  Deadline deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
};

// Ok if the GPU has `need_bytes` free, if need be once the service has unregistered sets on it that nobody holds, pins
// or names by an alias, those not used for longest first, as few as do. MEMORY_EXHAUSTED with need, have, and in
// `holders` the service's sets there and the processes that use it.
absl::Status MakeRoomOnGpu(const CudaContext& context, const std::string& uuid, int64_t need_bytes,
                           const RoomOptions& options);

}  // namespace weightbroker::client
