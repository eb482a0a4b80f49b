#include "common/device/gpu_digest.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/kernels/digest_tiles.h"
#include "common/device/kernels/kernels.h"

namespace weightbroker {
namespace {

using wbd1::DigestRange;

using Lanes = std::array<uint64_t, 2>;

absl::Status DigestError(CudaDriver& driver, CudaResult result, const char* call) {
  return CudaError(driver, result, call, "digesting tensors on the GPU");
}

// A stream, and device memory for the ranges and their lanes, for one call.
class Workspace {
 public:
  explicit Workspace(CudaDriver& driver) : driver_(driver) {}
  ~Workspace() {
    if (stream_ != nullptr) (void)driver_.StreamDestroy(stream_);
    if (memory_ != 0) (void)driver_.MemFree(memory_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  absl::Status Prepare(std::span<const DigestRange> ranges) {
    if (const auto result = driver_.StreamCreate(kCudaStreamNonBlocking, &stream_); result != kCudaSuccess) {
      return DigestError(driver_, result, "cuStreamCreate");
    }
    ranges_bytes_ = ranges.size_bytes();
    lanes_bytes_ = ranges.size() * sizeof(Lanes);
    if (const auto result = driver_.MemAlloc(ranges_bytes_ + lanes_bytes_, &memory_); result != kCudaSuccess) {
      return DigestError(driver_, result, "cuMemAlloc");
    }
    if (const auto result = driver_.MemcpyHtoDAsync(memory_, ranges.data(), ranges_bytes_, stream_);
        result != kCudaSuccess) {
      return DigestError(driver_, result, "cuMemcpyHtoDAsync");
    }
    const auto result = driver_.MemsetD8Async(lanes(), 0, lanes_bytes_, stream_);
    return result == kCudaSuccess ? absl::OkStatus() : DigestError(driver_, result, "cuMemsetD8Async");
  }

  absl::Status Launch(const GpuKernel& kernel, int64_t range_count, int64_t tile_count) {
    ASSIGN_OR_RETURN(const unsigned blocks, kernel.ChooseBlocks(tile_count));
    CudaDevicePtr ranges = memory_;
    CudaDevicePtr sums = lanes();
    void* parameters[] = {&ranges, &range_count, &tile_count, &sums};
    return kernel.Launch({.grid_blocks = blocks, .block_threads = wbd1::kDigestThreads}, stream_, parameters);
  }

  absl::Status Fetch(std::vector<Lanes>* sums) {
    if (const auto result = driver_.MemcpyDtoHAsync(sums->data(), lanes(), lanes_bytes_, stream_);
        result != kCudaSuccess) {
      return DigestError(driver_, result, "cuMemcpyDtoHAsync");
    }
    const auto result = driver_.StreamSynchronize(stream_);
    return result == kCudaSuccess ? absl::OkStatus() : DigestError(driver_, result, "cuStreamSynchronize");
  }

 private:
  CudaDevicePtr lanes() const { return memory_ + ranges_bytes_; }

  CudaDriver& driver_;
  CudaStream stream_ = nullptr;
  CudaDevicePtr memory_ = 0;
  size_t ranges_bytes_ = 0;
  size_t lanes_bytes_ = 0;
};

}  // namespace

bool HasGpuKernels() { return DigestKernelImage() != nullptr; }

absl::StatusOr<GpuDigester> GpuDigester::Create(const CudaContext& context) {
  ASSIGN_OR_RETURN(GpuKernel kernel, GpuKernel::Load(context, DigestKernelImage(), wbd1::kDigestKernelName));
  return GpuDigester(std::move(kernel));
}

absl::StatusOr<std::vector<Digest>> GpuDigester::Compute(std::span<const GpuRange> ranges) const {
  std::vector<DigestRange> table;
  int64_t tile_count = 0;
  for (const GpuRange& range : ranges) {
    table.push_back({range.address, range.size_bytes, tile_count});
    tile_count += wbd1::TilesOf(range.size_bytes);
  }
  std::vector<Lanes> sums(ranges.size(), Lanes{0, 0});
  if (tile_count > 0) {
    const CudaScope current(kernel_.context());
    RETURN_IF_ERROR(current.status());
    Workspace workspace(kernel_.context().driver());
    RETURN_IF_ERROR(workspace.Prepare(table));
    RETURN_IF_ERROR(workspace.Launch(kernel_, static_cast<int64_t>(table.size()), tile_count));
    RETURN_IF_ERROR(workspace.Fetch(&sums));
  }
  std::vector<Digest> digests;
  for (size_t i = 0; i < ranges.size(); ++i) digests.push_back(DigestAccumulator(sums[i]).Finish(ranges[i].size_bytes));
  return digests;
}

}  // namespace weightbroker
