#include "server/broker/sealed_shard.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {

absl::Status DistrustLoader(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the loader ", what));
}

absl::StatusOr<std::shared_ptr<const Shard>> ShardFromLoader(const internal::v1::LoadSealed& sealed,
                                                             std::vector<UniqueFd> fds, const RankPlacement& place,
                                                             v1::HandleKind kind) {
  if (sealed.rank() != place.rank) {
    return DistrustLoader(absl::StrCat("handed over rank ", sealed.rank(), " where rank ", place.rank, " was due"));
  }
  if (static_cast<int>(fds.size()) != sealed.slabs_size() + 1) {
    return DistrustLoader(
        absl::StrCat("handed over ", fds.size(), " descriptors for ", sealed.slabs_size(), " slabs and a manifest"));
  }
  UniqueFd manifest_fd = std::move(fds.back());
  fds.pop_back();
  auto shard = std::make_shared<Shard>();
  shard->rank = place.rank;
  shard->device = place.device;
  shard->handle_kind = kind;
  shard->slabs = {sealed.slabs().begin(), sealed.slabs().end()};
  ASSIGN_OR_RETURN(shard->size_bytes, CheckSlabs(shard->slabs, fds));
  ASSIGN_OR_RETURN(shard->manifest,
                   Manifest::FromLoader({std::move(manifest_fd), sealed.manifest_bytes(), sealed.manifest_sha256()},
                                        shard->slabs, sealed.tensor_count()));
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>(std::move(fds));
  shard->tensor_count = sealed.tensor_count();
  return shard;
}

}  // namespace weightbroker
