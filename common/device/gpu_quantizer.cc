#include "common/device/gpu_quantizer.h"

#include "common/base/status_macros.h"
#include "common/device/kernels/kernels.h"

namespace weightbroker {

absl::StatusOr<GpuQuantizer> GpuQuantizer::Create(const CudaContext& context) {
  const void* const image = Fp8BlockKernelImage();
  ASSIGN_OR_RETURN(GpuKernel bf16, GpuKernel::Load(context, image, kFp8KernelBf16));
  ASSIGN_OR_RETURN(GpuKernel f16, GpuKernel::Load(context, image, kFp8KernelF16));
  ASSIGN_OR_RETURN(GpuKernel f32, GpuKernel::Load(context, image, kFp8KernelF32));
  return GpuQuantizer(Kernels{std::move(bf16), std::move(f16), std::move(f32)});
}

absl::Status GpuQuantizer::Launch(Fp8Source source, Fp8BlockLaunch launch, CudaStream stream) const {
  if (launch.BlockCount() == 0) return absl::OkStatus();
  void* parameters[] = {&launch};
  return kernels_[static_cast<size_t>(source)].Launch(
      {.grid_blocks = static_cast<unsigned>(launch.BlockCount()), .block_threads = kFp8Threads}, stream, parameters);
}

}  // namespace weightbroker
