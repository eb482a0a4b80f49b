// GPU memory that a scrub reads: see scrub_memory.h.

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"
#include "common/memory/cuda_slab.h"
#include "server/loader/gpu_shard.h"
#include "server/loader/scrub_memory.h"

namespace weightbroker {
namespace {

class GpuScrubMemory : public ScrubMemory {
 public:
  explicit GpuScrubMemory(CudaContext context) : context_(std::move(context)) {}

  absl::Status Start() {
    if (HasGpuKernels()) {
      ASSIGN_OR_RETURN(on_gpu_, GpuDigester::Create(context_));
    } else {
      ASSIGN_OR_RETURN(CopyingDigester copying, CopyingDigester::Create(context_));
      by_copying_.emplace(std::move(copying));
    }
    return absl::OkStatus();
  }

  absl::Status Import(int fd, int64_t size_bytes) {
    ASSIGN_OR_RETURN(const CudaVmmMemory memory, CudaVmmMemory::Import(context_, fd, size_bytes));
    ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context_, memory.size_bytes()));
    RETURN_IF_ERROR(range.Map(0, memory, CudaAccess::kRead));
    addresses_.push_back(range.address());
    imported_.push_back(std::move(range));
    return absl::OkStatus();
  }

  absl::Status Open(const std::string& bytes, int64_t size_bytes) {
    CudaIpcHandle handle = {};
    if (bytes.size() != sizeof(handle)) return MakeError(Reason::kProtocolError, "a CUDA IPC handle is cut short");
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(&handle));
    ASSIGN_OR_RETURN(CudaIpcMapping mapping, CudaIpcMapping::Open(context_, handle, size_bytes));
    addresses_.push_back(mapping.address());
    opened_.push_back(std::move(mapping));
    return absl::OkStatus();
  }

  absl::StatusOr<Digest> DigestOf(const v1::Tensor& row, const OnRead& on_read) override {
    const GpuRange range{addresses_[static_cast<size_t>(row.slab())] + static_cast<CudaDevicePtr>(row.offset_bytes()),
                         row.size_bytes()};
    ASSIGN_OR_RETURN(const Digest digest, Compute(range));
    RETURN_IF_ERROR(on_read(row.size_bytes()));
    return digest;
  }

 private:
  absl::StatusOr<Digest> Compute(const GpuRange& range) {
    if (!on_gpu_.has_value()) return by_copying_->Compute(range);
    ASSIGN_OR_RETURN(const std::vector<Digest> digests, on_gpu_->Compute(std::span(&range, 1)));
    return digests.front();
  }

  const CudaContext context_;
  std::optional<GpuDigester> on_gpu_;
  std::optional<CopyingDigester> by_copying_;
  std::vector<CudaDevicePtr> addresses_;  // of each slab
  std::vector<CudaReservation> imported_;
  std::vector<CudaIpcMapping> opened_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ScrubMemory>> MapGpuForScrub(const internal::v1::LoadRequest& request,
                                                            std::span<const UniqueFd> fds, CudaDriver& cuda) {
  ASSIGN_OR_RETURN(CudaContext context, ContextOfGpu(cuda, request.ranks(0).device()));
  auto memory = std::make_unique<GpuScrubMemory>(std::move(context));
  RETURN_IF_ERROR(memory->Start());
  const auto& slabs = request.scrub().slabs();
  for (int i = 0; i < slabs.size(); ++i) {
    const v1::Slab& slab = slabs[i];
    RETURN_IF_ERROR(fds.empty() ? memory->Open(slab.cuda_ipc_handle(), slab.size_bytes())
                                : memory->Import(fds[static_cast<size_t>(i)].get(), slab.size_bytes()));
  }
  return memory;
}

}  // namespace weightbroker
