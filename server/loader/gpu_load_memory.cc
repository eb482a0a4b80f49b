// GPU memory that a load fills: see load_memory.h.

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/load/cuda_destination.h"
#include "server/loader/gpu_shard.h"
#include "server/loader/load_memory.h"

namespace weightbroker {
namespace {

class GpuLoadMemory : public LoadMemory {
 public:
  GpuLoadMemory(const internal::v1::LoadRequest& request, CudaOpener open_cuda)
      : request_(request), open_cuda_(std::move(open_cuda)) {}

  // Copies end before the memory goes.
  ~GpuLoadMemory() override { destinations_.clear(); }

  LoadOptions Tune(LoadOptions options) override {
    std::set<std::string> gpus;
    for (const internal::v1::RankPlacement& rank : request_.ranks()) gpus.insert(rank.device());
    return TuneForCuda(options, *buffers_, gpus.size());
  }

  int64_t pinned_bytes() const override { return buffers_ != nullptr ? buffers_->pinned_bytes() : 0; }
  int64_t unpinned_bytes() const override { return buffers_ != nullptr ? buffers_->unpinned_bytes() : 0; }

  int64_t contexts_ns() const override { return contexts_ns_; }

  // All GPUs at once: a context alone takes a tenth of a second. Meanwhile the read buffers' pages are made; they are
  // pinned while the GPUs clear their memory.
  absl::Status Allocate(const NodePlan& plan, const PreparedLoad& load) override {
    ASSIGN_OR_RETURN(CudaDriver* const cuda, open_cuda_());
    const size_t count = plan.shards.size();
    shards_.resize(count);
    destinations_.resize(count);
    std::map<std::string, Gpu> gpus;  // by UUID
    for (size_t i = 0; i < count; ++i) gpus[request_.ranks(static_cast<int>(i)).device()].shards.push_back(i);
    std::vector<std::thread> threads;
    for (auto& [uuid, gpu] : gpus) {
      const auto allocate = [this, &plan, cuda, &uuid = uuid, &gpu = gpu] {
        gpu.status = AllocateOn(uuid, plan, *cuda, gpu);
      };
      auto thread = StartThread("taking a GPU's memory", allocate);
      if (thread.ok()) {
        threads.push_back(*std::move(thread));
      } else {
        allocate();
      }
    }
    const absl::Status reserved = buffers_->Reserve(load.buffer_count(), load.buffer_bytes());
    for (std::thread& thread : threads) thread.join();
    RETURN_IF_ERROR(reserved);
    for (const auto& [uuid, gpu] : gpus) {
      RETURN_IF_ERROR(WithHolders(gpu.status, uuid));
      contexts_ns_ = std::max(contexts_ns_, gpu.context_ns);
    }
    buffers_->Pin(gpus.begin()->second.context);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<FinishedSlab>> Finish(size_t shard) override { return shards_[shard]->Finish(); }

  void FreeWorkingMemory() override {
    destinations_.clear();
    buffers_.reset();
  }

  bool needs_exporter() const override { return request_.handle_kind() == v1::HANDLE_KIND_CUDA_IPC; }

 private:
  struct Gpu {
    std::vector<size_t> shards;  // of the plan
    CudaContext context;
    int64_t context_ns = 0;
    absl::Status status;
  };

  absl::Status AllocateOn(const std::string& uuid, const NodePlan& plan, CudaDriver& cuda, Gpu& gpu) {
    ASSIGN_OR_RETURN(gpu.context, ContextOfGpu(cuda, uuid));
    gpu.context_ns = SteadyNanoseconds();
    for (const size_t index : gpu.shards) {
      ASSIGN_OR_RETURN(shards_[index], GpuShard::Create(gpu.context, uuid, request_.handle_kind()));
      GpuShard& shard = *shards_[index];
      RETURN_IF_ERROR(shard.AddUncleared(plan.shards[index].slab_bytes));
      ASSIGN_OR_RETURN(destinations_[index], MakeCudaDestination(plan.shards[index], shard.slabs(), gpu.context,
                                                                 [&shard] { return shard.Protect(); }));
    }
    return absl::OkStatus();
  }

  const internal::v1::LoadRequest& request_;
  const CudaOpener open_cuda_;
  int64_t contexts_ns_ = 0;
  std::unique_ptr<CudaBuffers> buffers_ = std::make_unique<CudaBuffers>();
  std::vector<std::unique_ptr<GpuShard>> shards_;
};

}  // namespace

std::unique_ptr<LoadMemory> MakeGpuLoadMemory(const internal::v1::LoadRequest& request, CudaOpener open_cuda) {
  return std::make_unique<GpuLoadMemory>(request, std::move(open_cuda));
}

}  // namespace weightbroker
