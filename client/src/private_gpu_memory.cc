#include "client/src/private_gpu_memory.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/cuda_memory.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {

absl::StatusOr<std::unique_ptr<PrivateGpuMemory>> PrivateGpuMemory::Create(const EngineDevice& engine,
                                                                           const ShardPlan& plan,
                                                                           const RoomOptions& room) {
  RETURN_IF_ERROR(CheckCudaVmmSupport(*engine.driver, engine.device));
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*engine.driver, engine.device));
  std::unique_ptr<PrivateGpuMemory> memory(new PrivateGpuMemory(context, engine.uuid));
  for (const int64_t size_bytes : plan.slab_bytes) {
    ASSIGN_OR_RETURN(memory->slab_bytes_.emplace_back(), CudaVmmSizeBytes(*engine.driver, engine.device, size_bytes));
  }
  const int64_t need_bytes = std::accumulate(memory->slab_bytes_.begin(), memory->slab_bytes_.end(), int64_t{0});
  RETURN_IF_ERROR(MakeRoomOnGpu(context, engine.uuid, need_bytes, room));
  RETURN_IF_ERROR(memory->Allocate(plan));
  return memory;
}

// Copies end before the memory goes.
PrivateGpuMemory::~PrivateGpuMemory() { destination_.reset(); }

absl::Status PrivateGpuMemory::Allocate(const ShardPlan& plan) {
  std::vector<CudaVmmMemory> slabs;
  for (const int64_t size_bytes : slab_bytes_) {
    ASSIGN_OR_RETURN(CudaVmmMemory slab, CudaVmmMemory::Create(context_, size_bytes));
    slabs.push_back(std::move(slab));
  }
  std::vector<GpuRange> ranges;
  if (!slabs.empty()) {
    const int64_t total_bytes = std::accumulate(slab_bytes_.begin(), slab_bytes_.end(), int64_t{0});
    ASSIGN_OR_RETURN(range_, CudaReservation::Reserve(context_, total_bytes));
  }
  int64_t offset_bytes = 0;
  for (const CudaVmmMemory& slab : slabs) {
    RETURN_IF_ERROR(range_->Map(offset_bytes, slab, CudaAccess::kReadWrite));
    ranges.push_back({range_->address() + static_cast<CudaDevicePtr>(offset_bytes), slab.size_bytes()});
    offset_bytes += slab.size_bytes();
  }
  const auto protect = [this] { return range_.has_value() ? range_->SetAccess(CudaAccess::kRead) : absl::OkStatus(); };
  ASSIGN_OR_RETURN(destination_, MakeCudaDestination(plan, std::move(ranges), context_, protect));
  return absl::OkStatus();
}

absl::Status PrivateGpuMemory::ReserveFor(const PreparedLoad& load) {
  RETURN_IF_ERROR(buffers_.Reserve(load.buffer_count(), load.buffer_bytes()));
  buffers_.Pin(context_);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ShardMemory>> PrivateGpuMemory::Finish() && {
  destination_.reset();
  return CudaMemory::Take(context_, uuid_, std::exchange(range_, std::nullopt), slab_bytes_);
}

}  // namespace weightbroker::client
