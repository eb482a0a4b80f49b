// GPU memory that a load fills: see load_memory.h.

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "common/base/status_macros.h"
#include "common/load/cuda_destination.h"
#include "server/loader/gpu_shard.h"
#include "server/loader/load_memory.h"

namespace weightbroker {
namespace {

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
    if (!needs_exporter()) shards_[shard].reset();  // descriptors keep the memory
    return finished;
  }

  bool needs_exporter() const override { return kind_ == v1::HANDLE_KIND_CUDA_IPC; }

 private:
  absl::Status AddShard(const ShardPlan& plan, const std::string& uuid, CudaDriver& cuda) {
    ASSIGN_OR_RETURN(const CudaContext context, ContextOf(uuid, cuda));
    if (buffers_ == nullptr) buffers_ = std::make_unique<CudaBuffers>(context);
    std::unique_ptr<GpuShard>& shard = shards_.emplace_back();
    ASSIGN_OR_RETURN(shard, GpuShard::Create(context, uuid, kind_));
    RETURN_IF_ERROR(shard->Add(plan.slab_bytes));
    std::vector<CudaDevicePtr> addresses;
    for (const GpuShard::Slab& slab : shard->slabs()) addresses.push_back(slab.address);
    ASSIGN_OR_RETURN(
        destinations_.emplace_back(),
        MakeCudaDestination(plan, std::move(addresses), context, [memory = shard.get()] { return memory->Protect(); }));
    return absl::OkStatus();
  }

  absl::StatusOr<CudaContext> ContextOf(const std::string& uuid, CudaDriver& cuda) {
    if (const auto known = contexts_.find(uuid); known != contexts_.end()) return known->second;
    ASSIGN_OR_RETURN(const CudaContext context, ContextOfGpu(cuda, uuid));
    contexts_.emplace(uuid, context);
    return context;
  }

  const v1::HandleKind kind_;
  std::map<std::string, CudaContext> contexts_;  // by UUID
  std::unique_ptr<CudaBuffers> buffers_;
  std::vector<std::unique_ptr<GpuShard>> shards_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadMemory>> AllocateOnGpus(const internal::v1::LoadRequest& request,
                                                           const NodePlan& plan, CudaDriver& cuda) {
  auto memory = std::make_unique<GpuLoadMemory>(request.handle_kind());
  RETURN_IF_ERROR(memory->Allocate(request, plan, cuda));
  return memory;
}

}  // namespace weightbroker
