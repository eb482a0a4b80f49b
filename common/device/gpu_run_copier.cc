#include "common/device/gpu_run_copier.h"

#include "common/base/status_macros.h"
#include "common/device/kernels/kernels.h"

namespace weightbroker {

absl::StatusOr<GpuRunCopier> GpuRunCopier::Create(const CudaContext& context) {
  ASSIGN_OR_RETURN(GpuKernel kernel, GpuKernel::Load(context, CopyRunsKernelImage(), kCopyRunsKernelName));
  int has_one_address = 0;
  const CudaResult result =
      context.driver().DeviceGetAttribute(context.device(), kCudaAttributeOneAddressForPinnedMemory, &has_one_address);
  return GpuRunCopier(std::move(kernel), result == kCudaSuccess && has_one_address != 0);
}

bool GpuRunCopier::CanRead(std::span<const std::byte> host_memory) const {
  if (!has_one_address_) return false;
  int type = 0;
  const auto address = reinterpret_cast<CudaDevicePtr>(host_memory.data());
  return kernel_.context().driver().PointerGetMemoryType(address, &type) == kCudaSuccess && type == kCudaMemoryHost;
}

absl::Status GpuRunCopier::Launch(std::span<const CopyRun> runs, CudaStream stream) const {
  if (runs.empty()) return absl::OkStatus();
  const CopyRun* first = runs.data();
  auto count = static_cast<int64_t>(runs.size());
  constexpr int64_t kRunsOfABlock = kCopyRunsThreads / kCopyRunsLanes;
  ASSIGN_OR_RETURN(const unsigned blocks, kernel_.ChooseBlocks((count + kRunsOfABlock - 1) / kRunsOfABlock));
  void* parameters[] = {&first, &count};
  return kernel_.Launch({.grid_blocks = blocks, .block_threads = kCopyRunsThreads}, stream, parameters);
}

}  // namespace weightbroker
