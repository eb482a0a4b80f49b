// From what the service says of a shard to its memory, mapped into this process.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/src/engine_device.h"
#include "client/src/shard_memory.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// Redeems the header's ticket, or takes its CUDA IPC handles, and maps every slab for the engine's device.
// PROTOCOL_ERROR if the header cannot be right; DEVICE_MISMATCH if the shard lies elsewhere; the errors of
// RedeemTicket, HostMemory::Map, and CudaMemory::Import and Open; SERVICE_UNAVAILABLE if the connection broke.
// Thread-safe.
absl::StatusOr<std::unique_ptr<ShardMemory>> MapShard(const Connection& connection, const v1::ExportHeader& header,
                                                      const EngineDevice& engine, Deadline deadline);

// An error for what a service answered to Export that cannot be right.
absl::Status NotTrusted(const std::string& what);

}  // namespace weightbroker::client
