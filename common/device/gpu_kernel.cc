#include "common/device/gpu_kernel.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// Enough blocks of 256 threads for each multiprocessor to hide the latency of its memory.
constexpr int64_t kBlocksPerMultiprocessor = 8;

}  // namespace

absl::StatusOr<GpuKernel> GpuKernel::Load(const CudaContext& context, const void* image, const char* name) {
  if (image == nullptr) {
    return MakeError(Reason::kGpuUnavailable, "this build has no GPU kernels: it was made without CUDA's compiler");
  }
  CudaDriver& driver = context.driver();
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  CudaModule module = nullptr;
  if (const auto result = driver.ModuleLoadData(image, &module); result != kCudaSuccess) {
    ASSIGN_OR_RETURN(const std::string uuid, UuidOfCudaDevice(driver, context.device()));
    return MakeError(Reason::kDeviceUnsupported,
                     absl::StrCat("the kernels of this build do not run on the GPU ", uuid,
                                  ": cuModuleLoadData: ", driver.ErrorName(result), "; a newer driver may run them"),
                     {{"device_uuid", uuid}, {"call", "cuModuleLoadData"}, {"result", driver.ErrorName(result)}});
  }
  GpuKernel kernel(context, module);
  kernel.name_ = name;
  const auto result = driver.ModuleGetFunction(module, name, &kernel.function_);
  if (result != kCudaSuccess) return CudaError(driver, result, "cuModuleGetFunction", absl::StrCat("loading ", name));
  return kernel;
}

absl::Status GpuKernel::Launch(const CudaLaunch& launch, CudaStream stream, void** parameters) const {
  const auto result = context_.driver().LaunchKernel(function_, launch, stream, parameters);
  if (result == kCudaSuccess) return absl::OkStatus();
  return CudaError(context_.driver(), result, "cuLaunchKernel", absl::StrCat("starting ", name_));
}

absl::StatusOr<unsigned> GpuKernel::ChooseBlocks(int64_t most) const {
  int multiprocessors = 0;
  const auto result =
      context_.driver().DeviceGetAttribute(context_.device(), kCudaAttributeMultiprocessorCount, &multiprocessors);
  if (result != kCudaSuccess) {
    return CudaError(context_.driver(), result, "cuDeviceGetAttribute", "counting multiprocessors");
  }
  return static_cast<unsigned>(std::clamp<int64_t>(multiprocessors * kBlocksPerMultiprocessor, 1, most));
}

GpuKernel& GpuKernel::operator=(GpuKernel&& other) noexcept {
  if (this == &other) return *this;
  Release();
  context_ = std::move(other.context_);
  module_ = std::exchange(other.module_, nullptr);
  function_ = std::exchange(other.function_, nullptr);
  name_ = other.name_;
  return *this;
}

void GpuKernel::Release() {
  if (!context_.has_value()) return;
  {
    const CudaScope current(context_);
    (void)context_.driver().ModuleUnload(module_);
  }
  context_ = CudaContext();
}

}  // namespace weightbroker
