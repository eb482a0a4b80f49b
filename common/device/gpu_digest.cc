#include "common/device/gpu_digest.h"

#include <algorithm>
#include <utility>

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

constexpr int64_t kPieceBytes = 16 << 20;  // a multiple of 8, so that pieces' sums can be merged

bool IsAligned(const GpuRange& range) { return range.address % sizeof(uint64_t) == 0; }

// Puts the digests of those ranges that the kernel cannot read in the places that it has left.
absl::Status DigestUnaligned(const CudaContext& context, std::span<const GpuRange> ranges,
                             std::vector<Digest>& digests) {
  if (std::all_of(ranges.begin(), ranges.end(), IsAligned)) return absl::OkStatus();
  ASSIGN_OR_RETURN(CopyingDigester digester, CopyingDigester::Create(context));
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (IsAligned(ranges[i])) continue;
    ASSIGN_OR_RETURN(digests[i], digester.Compute(ranges[i]));
  }
  return absl::OkStatus();
}

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
    const int64_t size_bytes = IsAligned(range) ? range.size_bytes : 0;
    table.push_back({range.address, size_bytes, tile_count});
    tile_count += wbd1::TilesOf(size_bytes);
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
  RETURN_IF_ERROR(DigestUnaligned(kernel_.context(), ranges, digests));
  return digests;
}

// ---- CopyingDigester

CopyingDigester::CopyingDigester(CudaContext context) : context_(std::move(context)), buffer_(kPieceBytes) {}

CopyingDigester::CopyingDigester(CopyingDigester&& other) noexcept
    : context_(other.context_), stream_(std::exchange(other.stream_, nullptr)), buffer_(std::move(other.buffer_)) {}

CopyingDigester::~CopyingDigester() {
  if (stream_ == nullptr) return;
  const CudaScope current(context_);
  (void)context_.driver().StreamDestroy(stream_);
}

absl::StatusOr<CopyingDigester> CopyingDigester::Create(const CudaContext& context) {
  CopyingDigester digester(context);
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  const CudaResult result = context.driver().StreamCreate(kCudaStreamNonBlocking, &digester.stream_);
  if (result != kCudaSuccess) return DigestError(context.driver(), result, "cuStreamCreate");
  return digester;
}

absl::StatusOr<Digest> CopyingDigester::Compute(const GpuRange& range) {
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  CudaDriver& driver = context_.driver();
  DigestAccumulator sum;
  for (int64_t offset = 0; offset < range.size_bytes; offset += kPieceBytes) {
    const auto size = static_cast<size_t>(std::min(kPieceBytes, range.size_bytes - offset));
    CudaResult result =
        driver.MemcpyDtoHAsync(buffer_.data(), range.address + static_cast<CudaDevicePtr>(offset), size, stream_);
    if (result == kCudaSuccess) result = driver.StreamSynchronize(stream_);
    if (result != kCudaSuccess) return DigestError(driver, result, "cuMemcpyDtoHAsync");
    sum.Add(offset, std::span(buffer_).first(size));
  }
  return sum.Finish(range.size_bytes);
}

}  // namespace weightbroker
