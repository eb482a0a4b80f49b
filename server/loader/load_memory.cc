#include "server/loader/load_memory.h"

#include <utility>

#include "common/base/status_macros.h"
#include "common/load/host_destination.h"
#include "common/memory/host_slab.h"
#include "server/loader/hand_over.h"

namespace weightbroker {
namespace {

class HostLoadMemory : public LoadMemory {
 public:
  absl::Status Allocate(const NodePlan& plan, const PreparedLoad& /*load*/) override {
    slabs_.resize(plan.shards.size());  // destinations point into it
    for (size_t i = 0; i < plan.shards.size(); ++i) {
      for (const int64_t size_bytes : plan.shards[i].slab_bytes) {
        ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(size_bytes));
        slabs_[i].push_back(std::move(slab));
      }
      destinations_.push_back(MakeHostDestination(plan.shards[i], slabs_[i]));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<FinishedSlab>> Finish(size_t shard) override {
    std::vector<FinishedSlab> finished;
    for (HostSlab& slab : slabs_[shard]) {
      ASSIGN_OR_RETURN(SealedSlab sealed, std::move(slab).Seal());
      finished.push_back(FromSealed(std::move(sealed)));
    }
    return finished;
  }

 private:
  std::vector<std::vector<HostSlab>> slabs_;  // by shard
};

}  // namespace

bool IsForHost(const internal::v1::LoadRequest& request) {
  return request.handle_kind() == v1::HANDLE_KIND_UNSPECIFIED || request.handle_kind() == v1::HANDLE_KIND_HOST_MEMFD;
}

std::unique_ptr<LoadMemory> LoadMemory::Make(const internal::v1::LoadRequest& request, const CudaOpener& open_cuda) {
  if (IsForHost(request)) {
    return std::make_unique<HostLoadMemory>();
  }
  return MakeGpuLoadMemory(request, open_cuda);
}

}  // namespace weightbroker
