#include "client/src/cuda_verify.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "client/src/verify.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/device/gpu_digest.h"

namespace weightbroker::client {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;  // a multiple of 8, so that pieces' sums can be merged

CudaDevicePtr AddressOf(const Tensor& tensor) { return reinterpret_cast<CudaDevicePtr>(tensor.data); }

// Those with memory of their own: an alias is verified under its tensor's name.
std::vector<const Tensor*> Owners(const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> owners;
  for (const Tensor& tensor : tensors) {
    if (tensor.alias_of.empty()) owners.push_back(&tensor);
  }
  return owners;
}

// Brings device memory to the host, a piece at a time.
class Copier {
 public:
  explicit Copier(CudaDriver& driver) : driver_(driver), buffer_(kPieceBytes) {}
  ~Copier() {
    if (stream_ != nullptr) driver_.StreamDestroy(stream_);
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  absl::Status Start() {
    const CudaResult result = driver_.StreamCreate(/*flags=*/0, &stream_);
    return result == kCudaSuccess ? absl::OkStatus()
                                  : CudaError(driver_, result, "cuStreamCreate", "verifying weights");
  }

  absl::StatusOr<std::span<const std::byte>> Copy(CudaDevicePtr from, int64_t size_bytes) {
    const auto size = static_cast<size_t>(size_bytes);
    CudaResult result = driver_.MemcpyDtoHAsync(buffer_.data(), from, size, stream_);
    if (result == kCudaSuccess) result = driver_.StreamSynchronize(stream_);
    if (result != kCudaSuccess)
      return CudaError(driver_, result, "cuMemcpyDtoHAsync", "reading weights to verify them");
    return std::span<const std::byte>(buffer_.data(), size);
  }

 private:
  CudaDriver& driver_;
  CudaStream stream_ = nullptr;
  std::vector<std::byte> buffer_;
};

absl::Status VerifyTensor(const Tensor& tensor, Copier& copier) {
  DigestAccumulator sum;
  for (int64_t offset = 0; offset < tensor.size_bytes; offset += kPieceBytes) {
    const int64_t size_bytes = std::min(kPieceBytes, tensor.size_bytes - offset);
    ASSIGN_OR_RETURN(const auto bytes, copier.Copy(AddressOf(tensor) + static_cast<CudaDevicePtr>(offset), size_bytes));
    sum.Add(offset, bytes);
  }
  return CheckDigest(tensor, sum.Finish(tensor.size_bytes));
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
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  Copier copier(context.driver());
  RETURN_IF_ERROR(copier.Start());
  for (const Tensor* tensor : Owners(tensors)) RETURN_IF_ERROR(VerifyTensor(*tensor, copier));
  return absl::OkStatus();
}

}  // namespace weightbroker::client
