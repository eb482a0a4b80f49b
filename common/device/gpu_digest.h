// wbd1 digests (see memory/digest.h) of GPU memory, computed on the GPU at the speed of its memory.
//
//   ASSIGN_OR_RETURN(const GpuDigester digester, GpuDigester::Create(context));   // GPU_UNAVAILABLE without kernels
//   ASSIGN_OR_RETURN(const std::vector<Digest> digests, digester.Compute(ranges));
//
// The digester is thread-safe: each call and each run has its own stream. It holds the context. Move-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_kernel.h"
#include "common/memory/digest.h"

namespace weightbroker {

// Whether this build has GPU kernels: without CUDA's compiler it has none, and the service offers host memory only.
bool HasGpuKernels();

// A run of device memory.
struct GpuRange {
  CudaDevicePtr address = 0;
  int64_t size_bytes = 0;  // may be 0
};

// Digests of ranges that become ready one after the other, while the GPU has other work.
//
//   ASSIGN_OR_RETURN(GpuDigestRun run, digester.Begin(most_ranges));
//   RETURN_IF_ERROR(run.Add(ranges));                                     // as often as there are some; waits for none
//   ASSIGN_OR_RETURN(const std::vector<Digest> digests, run.Finish());    // of all, in the order of their Add
//
// Not thread-safe. The digester must outlive it. Move-only.
class GpuDigestRun {
 public:
  GpuDigestRun(GpuDigestRun&& other) noexcept;
  GpuDigestRun& operator=(GpuDigestRun&&) = delete;
  ~GpuDigestRun();

  // Enqueues the digests of `ranges`, in which everything has landed. All ranges together are at most as many as Begin
  // was told. What does not start at a multiple of 8, as only a part of a tensor may, is digested on the host, at the
  // end. CUDA_ERROR.
  absl::Status Add(std::span<const GpuRange> ranges);

  // Waits for them; nothing is added after it. CUDA_ERROR.
  absl::StatusOr<std::vector<Digest>> Finish();

 private:
  friend class GpuDigester;
  class Workspace;
  GpuDigestRun(const GpuKernel& kernel, std::unique_ptr<Workspace> workspace);

  const GpuKernel* kernel_;
  std::unique_ptr<Workspace> workspace_;
  std::vector<GpuRange> ranges_;  // as they came
};

class GpuDigester {
 public:
  // GPU_UNAVAILABLE in a build without kernels; DEVICE_UNSUPPORTED if they do not run on this GPU; CUDA_ERROR.
  static absl::StatusOr<GpuDigester> Create(const CudaContext& context);

  // The digest of each range, in their order. Waits for the GPU. What other streams write meanwhile may be seen or not:
  // synchronize before. Needs a few bytes of device memory a range. What does not start at a multiple of 8, as only a
  // part of a tensor may, is digested on the host.
  absl::StatusOr<std::vector<Digest>> Compute(std::span<const GpuRange> ranges) const;

  // For `most_ranges` ranges, for which it takes device memory now: 40 bytes each. CUDA_ERROR, MEMORY_EXHAUSTED.
  absl::StatusOr<GpuDigestRun> Begin(size_t most_ranges) const;

 private:
  explicit GpuDigester(GpuKernel kernel) : kernel_(std::move(kernel)) {}

  GpuKernel kernel_;
};

// The same on the host, to which every byte is copied, at a fraction of the speed: for ranges that start anywhere, and
// for builds without kernels. Not thread-safe.
class CopyingDigester {
 public:
  static absl::StatusOr<CopyingDigester> Create(const CudaContext& context);

  CopyingDigester(CopyingDigester&& other) noexcept;
  CopyingDigester& operator=(CopyingDigester&&) = delete;
  ~CopyingDigester();

  absl::StatusOr<Digest> Compute(const GpuRange& range);

 private:
  explicit CopyingDigester(CudaContext context);

  const CudaContext context_;
  CudaStream stream_ = nullptr;  // null once moved from
  std::vector<std::byte> buffer_;
};

}  // namespace weightbroker
