// GPU memory that a load from disk fills for this process alone; read-only once it is filled, like a service's.
//
//   auto memory = PrivateGpuMemory::Create(engine, plan.shards[0], room);
//   if (!memory.ok()) return memory.status();                    // MEMORY_EXHAUSTED: need, have, and who holds it
//   ASSIGN_OR_RETURN(const auto load, PreparedLoad::Create(source, (*memory)->Tune(options)));
//   RETURN_IF_ERROR((*memory)->ReserveFor(*load));
//   ASSIGN_OR_RETURN(auto digests, load->Run((*memory)->destinations(), progress));
//   ASSIGN_OR_RETURN(std::unique_ptr<ShardMemory> shard, std::move(**memory).Finish());
//
// The calling thread's current context is left as it was. Not thread-safe, but for what LoadNode does with it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/engine_device.h"
#include "client/src/gpu_room.h"
#include "client/src/shard_memory.h"
#include "common/device/cuda_context.h"
#include "common/load/cuda_destination.h"
#include "common/load/load_engine.h"
#include "common/memory/cuda_slab.h"
#include "common/plan/plan.h"

namespace weightbroker::client {

class PrivateGpuMemory {
 public:
  // Takes the plan's slabs on the engine's GPU, having made room as `room` says, and fills them with zeros. Nothing is
  // left behind if it fails. DEVICE_UNSUPPORTED for a GPU whose driver has no virtual memory management;
  // GPU_UNAVAILABLE in a build without kernels. `plan` must outlive the object.
  static absl::StatusOr<std::unique_ptr<PrivateGpuMemory>> Create(const EngineDevice& engine, const ShardPlan& plan,
                                                                  const RoomOptions& room);

  ~PrivateGpuMemory();
  PrivateGpuMemory(const PrivateGpuMemory&) = delete;
  PrivateGpuMemory& operator=(const PrivateGpuMemory&) = delete;

  // What a load needs to fill it: one destination, how to read, and memory to read into.
  std::span<const std::unique_ptr<Destination>> destinations() const { return {&destination_, 1}; }
  LoadOptions Tune(LoadOptions options) { return TuneForCuda(options, buffers_, 1); }
  absl::Status ReserveFor(const PreparedLoad& load);

  // After the load: the memory, which nobody can write any more.
  absl::StatusOr<std::unique_ptr<ShardMemory>> Finish() &&;

 private:
  PrivateGpuMemory(const CudaContext& context, std::string uuid) : context_(context), uuid_(std::move(uuid)) {}
  absl::Status Allocate(const ShardPlan& plan);

  const CudaContext context_;
  const std::string uuid_;
  CudaBuffers buffers_;
  std::vector<int64_t> slab_bytes_;
  std::optional<CudaReservation> range_;  // none if every tensor is empty
  std::unique_ptr<Destination> destination_;
};

}  // namespace weightbroker::client
