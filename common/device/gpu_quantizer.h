// Block-wise FP8 on the GPU: the bytes of quant/fp8_block.h, at the speed of the GPU's memory.
//
//   ASSIGN_OR_RETURN(const GpuQuantizer quantizer, GpuQuantizer::Create(context));   // GPU_UNAVAILABLE without kernels
//   RETURN_IF_ERROR(quantizer.Launch(Fp8Source::kBf16, launch, stream));             // in a CudaScope of the context
//
// Thread-safe. It holds the context. Move-only.
#pragma once

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/gpu_kernel.h"
#include "common/quant/fp8_block_tile.h"

namespace weightbroker {

enum class Fp8Source { kBf16, kF16, kF32 };

class GpuQuantizer {
 public:
  // Fails as GpuKernel::Load does.
  static absl::StatusOr<GpuQuantizer> Create(const CudaContext& context);

  // Quantizes a matrix that is in device memory, when the stream comes to it. A matrix of nothing is nothing to do.
  // CUDA_ERROR.
  absl::Status Launch(Fp8Source source, Fp8BlockLaunch launch, CudaStream stream) const;

 private:
  using Kernels = std::array<GpuKernel, 3>;  // by Fp8Source

  explicit GpuQuantizer(Kernels kernels) : kernels_(std::move(kernels)) {}

  Kernels kernels_;
};

}  // namespace weightbroker
