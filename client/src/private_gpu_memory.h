// GPU memory that this process fills for itself, where it loads weights from disk: written first, read-only afterwards,
// like a service's.
//
//   ASSIGN_OR_RETURN(auto memory, PrivateGpuMemory::Create(engine, slab_bytes, room));    // MEMORY_EXHAUSTED, holders
//   RETURN_IF_ERROR(memory.Write(slab, offset_bytes, bytes));
//   ASSIGN_OR_RETURN(std::unique_ptr<ShardMemory> shard, std::move(memory).Finish());
//
// Not thread-safe. The calling thread's current context is left as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/engine_device.h"
#include "client/src/gpu_room.h"
#include "client/src/shard_memory.h"
#include "common/device/cuda_context.h"
#include "common/memory/cuda_slab.h"

namespace weightbroker::client {

class PrivateGpuMemory {
 public:
  // Takes slabs of at least these sizes on the engine's GPU, having made room as `room` says. Nothing is left behind if
  // it fails. DEVICE_UNSUPPORTED for a GPU whose driver has no virtual memory management.
  static absl::StatusOr<PrivateGpuMemory> Create(const EngineDevice& engine, const std::vector<int64_t>& slab_bytes,
                                                 const RoomOptions& room);

  // Copies `bytes` to the GPU, and waits until they are there.
  absl::Status Write(size_t slab, int64_t offset_bytes, std::span<const std::byte> bytes);

  // Maps everything read-only; nothing is left that could write.
  absl::StatusOr<std::unique_ptr<ShardMemory>> Finish() &&;

 private:
  PrivateGpuMemory(CudaContext context, std::string uuid) : context_(std::move(context)), uuid_(std::move(uuid)) {}

  CudaContext context_;
  std::string uuid_;
  std::vector<CudaVmmMemory> slabs_;
  std::vector<CudaReservation> writable_;  // one for each slab
};

}  // namespace weightbroker::client
