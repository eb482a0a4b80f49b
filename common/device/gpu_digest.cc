#include "common/device/gpu_digest.h"

#include <algorithm>
#include <deque>
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

// ---- GpuDigestRun

// A stream, and device memory for the ranges and their lanes.
class GpuDigestRun::Workspace {
 public:
  Workspace(CudaContext context, size_t most_ranges)
      : context_(std::move(context)), driver_(context_.driver()), most_ranges_(most_ranges) {}
  ~Workspace() {
    const CudaScope current(context_);
    if (stream_ != nullptr) {
      (void)driver_.StreamSynchronize(stream_);  // a kernel still under way after an error writes to the memory
      (void)driver_.StreamDestroy(stream_);
    }
    if (memory_ != 0) (void)driver_.MemFree(memory_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The rest in a scope of the context.
  absl::Status Prepare() {
    RETURN_IF_ERROR(Check(driver_.StreamCreate(kCudaStreamNonBlocking, &stream_), "cuStreamCreate"));
    RETURN_IF_ERROR(
        Check(driver_.MemAlloc(most_ranges_ * (sizeof(DigestRange) + sizeof(Lanes)), &memory_), "cuMemAlloc"));
    return Check(driver_.MemsetD8Async(LanesAt(0), 0, most_ranges_ * sizeof(Lanes), stream_), "cuMemsetD8Async");
  }

  // Ranges that are numbered from `first` on.
  absl::Status Start(const GpuKernel& kernel, size_t first, std::vector<DigestRange> ranges_now, int64_t tile_count) {
    const std::vector<DigestRange>& table = tables_.emplace_back(std::move(ranges_now));
    CudaDevicePtr ranges = RangesAt(first);
    RETURN_IF_ERROR(Check(driver_.MemcpyHtoDAsync(ranges, table.data(), table.size() * sizeof(DigestRange), stream_),
                          "cuMemcpyHtoDAsync"));
    ASSIGN_OR_RETURN(const unsigned blocks, kernel.ChooseBlocks(tile_count));
    auto range_count = static_cast<int64_t>(table.size());
    CudaDevicePtr sums = LanesAt(first);
    void* parameters[] = {&ranges, &range_count, &tile_count, &sums};
    return kernel.Launch({.grid_blocks = blocks, .block_threads = wbd1::kDigestThreads}, stream_, parameters);
  }

  absl::StatusOr<std::vector<Lanes>> Fetch(size_t range_count) {
    std::vector<Lanes> sums(range_count);
    RETURN_IF_ERROR(Check(driver_.MemcpyDtoHAsync(sums.data(), LanesAt(0), range_count * sizeof(Lanes), stream_),
                          "cuMemcpyDtoHAsync"));
    RETURN_IF_ERROR(Check(driver_.StreamSynchronize(stream_), "cuStreamSynchronize"));
    return sums;
  }

  const CudaContext& context() const { return context_; }
  size_t most_ranges() const { return most_ranges_; }

 private:
  absl::Status Check(CudaResult result, const char* call) const {
    return result == kCudaSuccess ? absl::OkStatus() : DigestError(driver_, result, call);
  }
  CudaDevicePtr RangesAt(size_t i) const { return memory_ + i * sizeof(DigestRange); }
  CudaDevicePtr LanesAt(size_t i) const { return RangesAt(most_ranges_) + i * sizeof(Lanes); }

  const CudaContext context_;
  CudaDriver& driver_;
  const size_t most_ranges_;
  std::deque<std::vector<DigestRange>> tables_;  // which are copied from when the stream comes to it
  CudaStream stream_ = nullptr;
  CudaDevicePtr memory_ = 0;
};

GpuDigestRun::GpuDigestRun(const GpuKernel& kernel, std::unique_ptr<Workspace> workspace)
    : kernel_(&kernel), workspace_(std::move(workspace)) {}

GpuDigestRun::GpuDigestRun(GpuDigestRun&& other) noexcept = default;

GpuDigestRun::~GpuDigestRun() = default;

absl::Status GpuDigestRun::Add(std::span<const GpuRange> ranges) {
  if (ranges_.size() + ranges.size() > workspace_->most_ranges()) {
    return absl::InternalError("more ranges to digest than were said to come");
  }
  std::vector<DigestRange> table;
  int64_t tile_count = 0;
  for (const GpuRange& range : ranges) {
    const int64_t size_bytes = IsAligned(range) ? range.size_bytes : 0;
    table.push_back({range.address, size_bytes, tile_count});
    tile_count += wbd1::TilesOf(size_bytes);
  }
  if (tile_count > 0) {
    const CudaScope current(workspace_->context());
    RETURN_IF_ERROR(current.status());
    RETURN_IF_ERROR(workspace_->Start(*kernel_, ranges_.size(), std::move(table), tile_count));
  }
  ranges_.insert(ranges_.end(), ranges.begin(), ranges.end());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Digest>> GpuDigestRun::Finish() {
  std::vector<Digest> digests;
  if (ranges_.empty()) return digests;
  const CudaScope current(workspace_->context());
  RETURN_IF_ERROR(current.status());
  ASSIGN_OR_RETURN(const std::vector<Lanes> sums, workspace_->Fetch(ranges_.size()));
  for (size_t i = 0; i < sums.size(); ++i) {
    digests.push_back(DigestAccumulator(sums[i]).Finish(ranges_[i].size_bytes));
  }
  RETURN_IF_ERROR(DigestUnaligned(workspace_->context(), ranges_, digests));
  return digests;
}

// ---- GpuDigester

bool HasGpuKernels() { return DigestKernelImage() != nullptr; }

absl::StatusOr<GpuDigester> GpuDigester::Create(const CudaContext& context) {
  ASSIGN_OR_RETURN(GpuKernel kernel, GpuKernel::Load(context, DigestKernelImage(), wbd1::kDigestKernelName));
  return GpuDigester(std::move(kernel));
}

absl::StatusOr<GpuDigestRun> GpuDigester::Begin(size_t most_ranges) const {
  const CudaScope current(kernel_.context());
  RETURN_IF_ERROR(current.status());
  auto workspace = std::make_unique<GpuDigestRun::Workspace>(kernel_.context(), most_ranges);
  if (most_ranges > 0) RETURN_IF_ERROR(workspace->Prepare());
  return GpuDigestRun(kernel_, std::move(workspace));
}

absl::StatusOr<std::vector<Digest>> GpuDigester::Compute(std::span<const GpuRange> ranges) const {
  ASSIGN_OR_RETURN(GpuDigestRun run, Begin(ranges.size()));
  RETURN_IF_ERROR(run.Add(ranges));
  return run.Finish();
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
