#include "server/loader/gpu_shard.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"
#include "common/memory/cuda_slab.h"

namespace weightbroker {
namespace {

class VmmShard : public GpuShard {
 public:
  VmmShard(const CudaContext& context, const std::string& uuid) : GpuShard(context, uuid) {}

  absl::Status Protect() override {
    for (CudaReservation& range : ranges_) RETURN_IF_ERROR(range.SetAccess(CudaAccess::kRead));
    return absl::OkStatus();
  }

  bool needs_exporter() const override { return false; }

 protected:
  // What is added at once lies side by side.
  absl::StatusOr<std::vector<Slab>> Allocate(std::span<const int64_t> slab_bytes) override {
    std::vector<CudaVmmMemory> made;
    int64_t total_bytes = 0;
    for (const int64_t size_bytes : slab_bytes) {
      ASSIGN_OR_RETURN(CudaVmmMemory memory, CudaVmmMemory::Create(context(), size_bytes));
      total_bytes += memory.size_bytes();
      made.push_back(std::move(memory));
    }
    ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context(), total_bytes));
    std::vector<Slab> slabs;
    int64_t offset_bytes = 0;
    for (const CudaVmmMemory& memory : made) {
      RETURN_IF_ERROR(range.Map(offset_bytes, memory, CudaAccess::kReadWrite));
      slabs.push_back({range.address() + static_cast<CudaDevicePtr>(offset_bytes), memory.size_bytes()});
      offset_bytes += memory.size_bytes();
    }
    std::move(made.begin(), made.end(), std::back_inserter(memory_));
    ranges_.push_back(std::move(range));
    return slabs;
  }

  void Shrink(size_t count) override {
    ranges_.pop_back();
    while (memory_.size() > count) memory_.pop_back();
  }

  absl::Status Export(size_t slab, FinishedSlab* finished) const override {
    finished->description.set_handle_kind(v1::HANDLE_KIND_CUDA_VMM_FD);
    ASSIGN_OR_RETURN(finished->fd, memory_[slab].Export());
    return absl::OkStatus();
  }

 private:
  std::vector<CudaVmmMemory> memory_;
  std::vector<CudaReservation> ranges_;  // one for each Add
};

class IpcShard : public GpuShard {
 public:
  IpcShard(const CudaContext& context, const std::string& uuid) : GpuShard(context, uuid) {}

  absl::Status Protect() override { return absl::OkStatus(); }  // CUDA IPC has no read-only memory

  bool needs_exporter() const override { return true; }

 protected:
  absl::StatusOr<std::vector<Slab>> Allocate(std::span<const int64_t> slab_bytes) override {
    std::vector<CudaIpcMemory> made;
    std::vector<Slab> slabs;
    for (const int64_t size_bytes : slab_bytes) {
      ASSIGN_OR_RETURN(CudaIpcMemory memory, CudaIpcMemory::Allocate(context(), size_bytes));
      slabs.push_back({memory.address(), memory.size_bytes()});
      made.push_back(std::move(memory));
    }
    std::move(made.begin(), made.end(), std::back_inserter(memory_));
    return slabs;
  }

  void Shrink(size_t count) override {
    while (memory_.size() > count) memory_.pop_back();
  }

  absl::Status Export(size_t slab, FinishedSlab* finished) const override {
    ASSIGN_OR_RETURN(const CudaIpcHandle handle, memory_[slab].Export());
    finished->description.set_handle_kind(v1::HANDLE_KIND_CUDA_IPC);
    finished->description.set_cuda_ipc_handle(handle.data(), handle.size());
    return absl::OkStatus();
  }

 private:
  std::vector<CudaIpcMemory> memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuShard>> GpuShard::Create(const CudaContext& context, const std::string& uuid,
                                                           v1::HandleKind kind) {
  std::unique_ptr<GpuShard> shard;
  if (kind == v1::HANDLE_KIND_CUDA_IPC) {
    shard = std::make_unique<IpcShard>(context, uuid);
  } else {
    RETURN_IF_ERROR(CheckCudaVmmSupport(context.driver(), context.device()));
    shard = std::make_unique<VmmShard>(context, uuid);
  }
  return shard;
}

absl::Status GpuShard::Add(std::span<const int64_t> slab_bytes) {
  RETURN_IF_ERROR(AddUncleared(slab_bytes));
  if (slab_bytes.empty()) return absl::OkStatus();
  absl::Status cleared = FillWithZeros(std::span(slabs_).subspan(before_last_add_));
  if (!cleared.ok()) UndoAdd();
  return cleared;
}

absl::Status GpuShard::AddUncleared(std::span<const int64_t> slab_bytes) {
  if (slab_bytes.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<Slab> added, Allocate(slab_bytes));
  before_last_add_ = slabs_.size();
  slabs_.insert(slabs_.end(), added.begin(), added.end());
  return absl::OkStatus();
}

void GpuShard::UndoAdd() {
  Shrink(before_last_add_);
  slabs_.resize(before_last_add_);
}

absl::Status GpuShard::FillWithZeros(std::span<const Slab> slabs) const {
  CudaDriver& cuda = context_.driver();
  const CudaScope current(context_);
  RETURN_IF_ERROR(current.status());
  for (const Slab& slab : slabs) {
    const CudaResult result =
        cuda.MemsetD8Async(slab.address, 0, static_cast<size_t>(slab.size_bytes), /*stream=*/nullptr);
    if (result != kCudaSuccess) return CudaError(cuda, result, "cuMemsetD8Async", "clearing a slab");
  }
  const CudaResult result = cuda.CtxSynchronize();
  return result == kCudaSuccess ? absl::OkStatus() : CudaError(cuda, result, "cuCtxSynchronize", "clearing slabs");
}

absl::StatusOr<FinishedSlab> GpuShard::Share(size_t slab) const {
  FinishedSlab shared;
  RETURN_IF_ERROR(Export(slab, &shared));
  shared.description.set_size_bytes(slabs_[slab].size_bytes);
  shared.description.set_device_uuid(uuid_);
  return shared;
}

absl::StatusOr<std::vector<FinishedSlab>> GpuShard::Finish() const {
  std::vector<FinishedSlab> finished;
  for (size_t i = 0; i < slabs_.size(); ++i) {
    ASSIGN_OR_RETURN(finished.emplace_back(), Share(i));
  }
  return finished;
}

absl::Status WithHolders(const absl::Status& error, const std::string& uuid) {
  if (!HasReason(error, Reason::kMemoryExhausted)) return error;
  const auto inventory = OpenNvml();
  if (!inventory.ok()) return error;
  const auto processes = (*inventory)->Processes(uuid);
  if (!processes.ok()) return error;
  auto metadata = GetErrorDetails(error).metadata;
  metadata["holders"] = DescribeHolders(*processes);
  return MakeError(Reason::kMemoryExhausted, absl::StrCat(error.message(), "; processes there: ", metadata["holders"]),
                   metadata);
}

absl::StatusOr<CudaContext> ContextOfGpu(CudaDriver& cuda, const std::string& uuid) {
  ASSIGN_OR_RETURN(const CudaDevice device, FindCudaDevice(cuda, uuid));
  return CudaContext::Retain(cuda, device);
}

}  // namespace weightbroker
