#include "server/broker/sealed_shard.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "server/broker/names.h"

namespace weightbroker {

absl::Status DistrustLoader(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the loader ", what));
}

absl::StatusOr<std::shared_ptr<const Shard>> ShardFromLoader(const internal::v1::LoadSealed& sealed,
                                                             std::vector<UniqueFd> fds, const RankPlacement& place,
                                                             v1::HandleKind kind, GpuShardParts gpu) {
  if (sealed.rank() != place.rank) {
    return DistrustLoader(absl::StrCat("handed over rank ", sealed.rank(), " where rank ", place.rank, " was due"));
  }
  if (fds.size() != SlabFdCount(kind, static_cast<size_t>(sealed.slabs_size())) + 1) {
    return DistrustLoader(absl::StrCat("handed over ", fds.size(), " descriptors for ", sealed.slabs_size(),
                                       " slabs and a manifest, as ", HandleKindName(kind)));
  }
  UniqueFd manifest_fd = std::move(fds.back());
  fds.pop_back();
  auto shard = std::make_shared<Shard>();
  shard->rank = place.rank;
  shard->device = place.device;
  shard->handle_kind = kind;
  shard->exporter = std::move(gpu.exporter);
  shard->publisher = std::move(gpu.publisher);
  RETURN_IF_ERROR(TakeSlabs({sealed.slabs().begin(), sealed.slabs().end()}, &fds, gpu.check_gpu_fd, shard.get()));
  ASSIGN_OR_RETURN(shard->manifest,
                   Manifest::FromLoader({std::move(manifest_fd), sealed.manifest_bytes(), sealed.manifest_sha256()},
                                        shard->slabs, sealed.tensor_count()));
  shard->tensor_count = sealed.tensor_count();
  return shard;
}

}  // namespace weightbroker
