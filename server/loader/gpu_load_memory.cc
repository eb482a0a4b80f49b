// GPU memory that a load fills: see load_memory.h.

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_inventory.h"
#include "common/load/cuda_destination.h"
#include "common/memory/cuda_slab.h"
#include "server/loader/load_memory.h"

namespace weightbroker {
namespace {

// One shard's slabs, mapped to be written.
class GpuShard {
 public:
  virtual ~GpuShard() = default;

  virtual std::vector<CudaDevicePtr> addresses() const = 0;
  virtual std::vector<int64_t> sizes() const = 0;
  // Everything has been written: takes the right to write away as far as the kind allows.
  virtual absl::Status Protect() = 0;
  virtual absl::StatusOr<std::vector<FinishedSlab>> Finish() = 0;
};

class VmmShard : public GpuShard {
 public:
  static absl::StatusOr<std::unique_ptr<GpuShard>> Allocate(const CudaContext& context,
                                                            const std::vector<int64_t>& slab_bytes) {
    RETURN_IF_ERROR(CheckCudaVmmSupport(context.driver(), context.device()));
    auto shard = std::make_unique<VmmShard>();
    int64_t total_bytes = 0;
    for (const int64_t size_bytes : slab_bytes) {
      ASSIGN_OR_RETURN(CudaVmmMemory memory, CudaVmmMemory::Create(context, size_bytes));
      total_bytes += memory.size_bytes();
      shard->memory_.push_back(std::move(memory));
    }
    if (total_bytes == 0) return shard;
    ASSIGN_OR_RETURN(shard->range_, CudaReservation::Reserve(context, total_bytes));
    int64_t offset_bytes = 0;
    for (const CudaVmmMemory& memory : shard->memory_) {
      RETURN_IF_ERROR(shard->range_->Map(offset_bytes, memory, CudaAccess::kReadWrite));
      offset_bytes += memory.size_bytes();
    }
    return shard;
  }

  std::vector<CudaDevicePtr> addresses() const override {
    std::vector<CudaDevicePtr> addresses;
    CudaDevicePtr next = range_.has_value() ? range_->address() : 0;
    for (const CudaVmmMemory& memory : memory_) {
      addresses.push_back(next);
      next += static_cast<CudaDevicePtr>(memory.size_bytes());
    }
    return addresses;
  }

  std::vector<int64_t> sizes() const override {
    std::vector<int64_t> sizes;
    for (const CudaVmmMemory& memory : memory_) sizes.push_back(memory.size_bytes());
    return sizes;
  }

  absl::Status Protect() override {
    return range_.has_value() ? range_->SetAccess(CudaAccess::kRead) : absl::OkStatus();
  }

  // The last mapping goes before the first descriptor is made.
  absl::StatusOr<std::vector<FinishedSlab>> Finish() override {
    range_.reset();
    std::vector<FinishedSlab> finished;
    for (const CudaVmmMemory& memory : memory_) {
      FinishedSlab& slab = finished.emplace_back();
      slab.description.set_handle_kind(v1::HANDLE_KIND_CUDA_VMM_FD);
      slab.description.set_size_bytes(memory.size_bytes());
      ASSIGN_OR_RETURN(slab.fd, memory.Export());
    }
    memory_.clear();
    return finished;
  }

 private:
  std::vector<CudaVmmMemory> memory_;
  std::optional<CudaReservation> range_;  // of all of them, side by side
};

class IpcShard : public GpuShard {
 public:
  static absl::StatusOr<std::unique_ptr<GpuShard>> Allocate(const CudaContext& context,
                                                            const std::vector<int64_t>& slab_bytes) {
    auto shard = std::make_unique<IpcShard>();
    for (const int64_t size_bytes : slab_bytes) {
      ASSIGN_OR_RETURN(CudaIpcMemory memory, CudaIpcMemory::Allocate(context, size_bytes));
      shard->memory_.push_back(std::move(memory));
    }
    return shard;
  }

  std::vector<CudaDevicePtr> addresses() const override {
    std::vector<CudaDevicePtr> addresses;
    for (const CudaIpcMemory& memory : memory_) addresses.push_back(memory.address());
    return addresses;
  }

  std::vector<int64_t> sizes() const override {
    std::vector<int64_t> sizes;
    for (const CudaIpcMemory& memory : memory_) sizes.push_back(memory.size_bytes());
    return sizes;
  }

  absl::Status Protect() override { return absl::OkStatus(); }  // CUDA IPC has no read-only memory

  absl::StatusOr<std::vector<FinishedSlab>> Finish() override {
    std::vector<FinishedSlab> finished;
    for (const CudaIpcMemory& memory : memory_) {
      ASSIGN_OR_RETURN(const CudaIpcHandle handle, memory.Export());
      v1::Slab& slab = finished.emplace_back().description;
      slab.set_handle_kind(v1::HANDLE_KIND_CUDA_IPC);
      slab.set_size_bytes(memory.size_bytes());
      slab.set_cuda_ipc_handle(handle.data(), handle.size());
    }
    return finished;
  }

 private:
  std::vector<CudaIpcMemory> memory_;
};

absl::Status ZeroFill(const CudaContext& context, const GpuShard& shard) {
  CudaDriver& cuda = context.driver();
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  const std::vector<CudaDevicePtr> addresses = shard.addresses();
  const std::vector<int64_t> sizes = shard.sizes();
  for (size_t i = 0; i < addresses.size(); ++i) {
    const CudaResult result = cuda.MemsetD8Async(addresses[i], 0, static_cast<size_t>(sizes[i]), nullptr);
    if (result != kCudaSuccess) return CudaError(cuda, result, "cuMemsetD8Async", "clearing a slab");
  }
  const CudaResult result = cuda.CtxSynchronize();
  return result == kCudaSuccess ? absl::OkStatus() : CudaError(cuda, result, "cuCtxSynchronize", "clearing slabs");
}

// Who uses the GPU besides, where memory has run out and NVML says so.
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

class GpuLoadMemory : public LoadMemory {
 public:
  explicit GpuLoadMemory(v1::HandleKind kind) : kind_(kind) {}

  // Copies end before the memory goes.
  ~GpuLoadMemory() override { destinations_.clear(); }

  absl::Status Allocate(const internal::v1::LoadRequest& request, const NodePlan& plan, CudaDriver& cuda) {
    for (size_t i = 0; i < plan.shards.size(); ++i) {
      const std::string& uuid = request.ranks(static_cast<int>(i)).device();
      if (const absl::Status added = AddShard(plan.shards[i], uuid, cuda); !added.ok()) return WithHolders(added, uuid);
    }
    return absl::OkStatus();
  }

  LoadOptions Tune(LoadOptions options) const override {
    options.buffers = buffers_.get();
    options.chunk_bytes = kCudaChunkBytes;
    if (options.reader_threads == 0) options.reader_threads = kCudaReaderThreads;
    return options;
  }

  absl::StatusOr<std::vector<FinishedSlab>> Finish(size_t shard) override {
    destinations_[shard].reset();
    ASSIGN_OR_RETURN(std::vector<FinishedSlab> finished, shards_[shard]->Finish());
    for (FinishedSlab& slab : finished) slab.description.set_device_uuid(uuids_[shard]);
    return finished;
  }

  bool needs_exporter() const override { return kind_ == v1::HANDLE_KIND_CUDA_IPC; }

 private:
  absl::Status AddShard(const ShardPlan& plan, const std::string& uuid, CudaDriver& cuda) {
    ASSIGN_OR_RETURN(const CudaContext context, ContextOf(uuid, cuda));
    if (buffers_ == nullptr) buffers_ = std::make_unique<CudaBuffers>(context);
    std::unique_ptr<GpuShard>& shard = shards_.emplace_back();
    if (kind_ == v1::HANDLE_KIND_CUDA_IPC) {
      ASSIGN_OR_RETURN(shard, IpcShard::Allocate(context, plan.slab_bytes));
    } else {
      ASSIGN_OR_RETURN(shard, VmmShard::Allocate(context, plan.slab_bytes));
    }
    RETURN_IF_ERROR(ZeroFill(context, *shard));
    uuids_.push_back(uuid);
    ASSIGN_OR_RETURN(
        destinations_.emplace_back(),
        MakeCudaDestination(plan, shard->addresses(), context, [memory = shard.get()] { return memory->Protect(); }));
    return absl::OkStatus();
  }

  absl::StatusOr<CudaContext> ContextOf(const std::string& uuid, CudaDriver& cuda) {
    if (const auto known = contexts_.find(uuid); known != contexts_.end()) return known->second;
    ASSIGN_OR_RETURN(const CudaDevice device, FindCudaDevice(cuda, uuid));
    ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(cuda, device));
    contexts_.emplace(uuid, context);
    return context;
  }

  const v1::HandleKind kind_;
  std::map<std::string, CudaContext> contexts_;  // by UUID
  std::unique_ptr<CudaBuffers> buffers_;
  std::vector<std::unique_ptr<GpuShard>> shards_;
  std::vector<std::string> uuids_;  // of each shard's device
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadMemory>> AllocateOnGpus(const internal::v1::LoadRequest& request,
                                                           const NodePlan& plan, CudaDriver& cuda) {
  auto memory = std::make_unique<GpuLoadMemory>(request.handle_kind());
  RETURN_IF_ERROR(memory->Allocate(request, plan, cuda));
  return memory;
}

}  // namespace weightbroker
