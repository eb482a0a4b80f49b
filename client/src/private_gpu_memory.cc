#include "client/src/private_gpu_memory.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/cuda_memory.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {

absl::StatusOr<PrivateGpuMemory> PrivateGpuMemory::Create(const EngineDevice& engine,
                                                          const std::vector<int64_t>& slab_bytes,
                                                          const RoomOptions& room) {
  RETURN_IF_ERROR(CheckCudaVmmSupport(*engine.driver, engine.device));
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*engine.driver, engine.device));
  int64_t need_bytes = 0;
  for (const int64_t size_bytes : slab_bytes) {
    ASSIGN_OR_RETURN(const int64_t rounded, CudaVmmSizeBytes(*engine.driver, engine.device, size_bytes));
    need_bytes += rounded;
  }
  RETURN_IF_ERROR(MakeRoomOnGpu(context, engine.uuid, need_bytes, room));

  PrivateGpuMemory memory(context, engine.uuid);
  for (const int64_t size_bytes : slab_bytes) {
    ASSIGN_OR_RETURN(CudaVmmMemory slab, CudaVmmMemory::Create(context, size_bytes));
    ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context, slab.size_bytes()));
    RETURN_IF_ERROR(range.Map(0, slab, CudaAccess::kReadWrite));
    memory.slabs_.push_back(std::move(slab));
    memory.writable_.push_back(std::move(range));
  }
  return memory;
}

absl::Status PrivateGpuMemory::Write(size_t slab, int64_t offset_bytes, std::span<const std::byte> bytes) {
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  const CudaDevicePtr to = writable_[slab].address() + static_cast<CudaDevicePtr>(offset_bytes);
  CudaDriver& driver = context_.driver();
  CudaResult result = driver.MemcpyHtoDAsync(to, bytes.data(), bytes.size(), /*stream=*/nullptr);
  if (result == kCudaSuccess) result = driver.CtxSynchronize();
  if (result == kCudaSuccess) return absl::OkStatus();
  return CudaError(driver, result, "cuMemcpyHtoDAsync", absl::StrCat("writing slab ", slab, " on the GPU ", uuid_));
}

absl::StatusOr<std::unique_ptr<ShardMemory>> PrivateGpuMemory::Finish() && {
  ASSIGN_OR_RETURN(std::unique_ptr<ShardMemory> memory, CudaMemory::Adopt(context_, uuid_, slabs_));
  writable_.clear();
  slabs_.clear();
  return memory;
}

}  // namespace weightbroker::client
