#include "client/src/cuda_verify.h"

#include "client/src/verify.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"

namespace weightbroker::client {
namespace {

CudaDevicePtr AddressOf(const Tensor& tensor) { return reinterpret_cast<CudaDevicePtr>(tensor.data); }

// Those with memory of their own: an alias is verified under its tensor's name.
std::vector<const Tensor*> Owners(const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> owners;
  for (const Tensor& tensor : tensors) {
    if (tensor.alias_of.empty()) owners.push_back(&tensor);
  }
  return owners;
}

}  // namespace

absl::Status VerifyOnGpu(const CudaContext& context, const std::vector<Tensor>& tensors) {
  if (!HasGpuKernels()) return VerifyByCopying(context, tensors);
  const std::vector<const Tensor*> owners = Owners(tensors);
  std::vector<GpuRange> ranges;
  for (const Tensor* tensor : owners) ranges.push_back({AddressOf(*tensor), tensor->size_bytes});
  ASSIGN_OR_RETURN(const GpuDigester digester, GpuDigester::Create(context));
  ASSIGN_OR_RETURN(const std::vector<Digest> digests, digester.Compute(ranges));
  for (size_t i = 0; i < owners.size(); ++i) RETURN_IF_ERROR(CheckDigest(*owners[i], digests[i]));
  return absl::OkStatus();
}

absl::Status VerifyByCopying(const CudaContext& context, const std::vector<Tensor>& tensors) {
  ASSIGN_OR_RETURN(CopyingDigester digester, CopyingDigester::Create(context));
  for (const Tensor* tensor : Owners(tensors)) {
    ASSIGN_OR_RETURN(const Digest found, digester.Compute({AddressOf(*tensor), tensor->size_bytes}));
    RETURN_IF_ERROR(CheckDigest(*tensor, found));
  }
  return absl::OkStatus();
}

}  // namespace weightbroker::client
