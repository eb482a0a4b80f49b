// A kernel of this build, loaded into a context.
//
//   ASSIGN_OR_RETURN(const GpuKernel kernel, GpuKernel::Load(context, DigestKernelImage(), "weightbroker_digest"));
//   RETURN_IF_ERROR(kernel.Launch(launch, stream, parameters));              // in a CudaScope of the context
//
// Thread-safe once loaded. It holds the context. Move-only.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"

namespace weightbroker {

class GpuKernel {
 public:
  // GPU_UNAVAILABLE if `image` is null, as in a build without kernels; DEVICE_UNSUPPORTED if it does not run on this
  // GPU; CUDA_ERROR.
  static absl::StatusOr<GpuKernel> Load(const CudaContext& context, const void* image, const char* name);

  GpuKernel(GpuKernel&& other) noexcept { *this = std::move(other); }
  GpuKernel& operator=(GpuKernel&& other) noexcept;
  ~GpuKernel() { Release(); }

  // `parameters` points to each of the kernel's parameters, in their order. CUDA_ERROR.
  absl::Status Launch(const CudaLaunch& launch, CudaStream stream, void** parameters) const;

  // Blocks enough to keep the GPU busy, and no more than `most`, which is more than 0.
  absl::StatusOr<unsigned> ChooseBlocks(int64_t most) const;

  const CudaContext& context() const { return context_; }

 private:
  GpuKernel(CudaContext context, CudaModule module) : context_(std::move(context)), module_(module) {}
  void Release();

  CudaContext context_;  // none once moved from
  CudaModule module_ = nullptr;
  CudaFunction function_ = nullptr;  // of the module
  const char* name_ = "";
};

}  // namespace weightbroker
