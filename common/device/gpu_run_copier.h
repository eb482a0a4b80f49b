// Copies many short runs from pinned host memory into a GPU's at once, where a call for each would take longer than the
// bytes.
//
//   ASSIGN_OR_RETURN(const GpuRunCopier copier, GpuRunCopier::Create(context));   // GPU_UNAVAILABLE without kernels
//   if (copier.CanRead(chunk)) RETURN_IF_ERROR(copier.Launch(runs, stream));      // in a CudaScope of the context
//
// Thread-safe. It holds the context. Move-only.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/gpu_kernel.h"
#include "common/device/kernels/copy_runs.h"

namespace weightbroker {

class GpuRunCopier {
 public:
  // Fails as GpuKernel::Load does.
  static absl::StatusOr<GpuRunCopier> Create(const CudaContext& context);

  // Whether kernels can read this host memory where it is: if it is pinned, and pinned memory has one address for both
  // sides on this device.
  bool CanRead(std::span<const std::byte> host_memory) const;

  // `runs` is memory that CanRead, too, and stays until the stream has come so far. No run is longer than
  // kLongestCopyRun. CUDA_ERROR.
  absl::Status Launch(std::span<const CopyRun> runs, CudaStream stream) const;

 private:
  GpuRunCopier(GpuKernel kernel, bool has_one_address)
      : kernel_(std::move(kernel)), has_one_address_(has_one_address) {}

  GpuKernel kernel_;
  bool has_one_address_;
};

}  // namespace weightbroker
