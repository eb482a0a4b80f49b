#include "server/loader/hand_over.h"

#include <utility>
#include <vector>

#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/identity/sha256.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

FinishedSlab FromSealed(SealedSlab slab) {
  FinishedSlab finished;
  finished.description.set_size_bytes(slab.size_bytes);
  finished.description.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
  finished.description.set_page_kind(slab.page_kind);
  finished.fd = std::move(slab.fd);
  return finished;
}

absl::Status SendShard(int control_fd, const ShardFacts& facts, std::span<const FinishedSlab> slabs,
                       const std::string& manifest) {
  internal::v1::LoadEvent event;
  internal::v1::LoadSealed& sealed = *event.mutable_sealed();
  std::vector<int> fds;
  for (const FinishedSlab& slab : slabs) {
    *sealed.add_slabs() = slab.description;
    if (slab.fd.valid()) fds.push_back(slab.fd.get());
  }
  ASSIGN_OR_RETURN(const UniqueFd manifest_fd,
                   CreateSealedMemfd("weightbroker-manifest", std::as_bytes(std::span(manifest))));
  fds.push_back(manifest_fd.get());
  sealed.set_rank(facts.rank);
  sealed.set_tensor_count(facts.tensor_count);
  sealed.set_read_bytes(facts.read_bytes);
  sealed.set_digest_seconds(facts.digest_seconds);
  if (facts.report != nullptr) *sealed.mutable_report() = *facts.report;
  sealed.set_manifest_sha256(Sha256Bytes(manifest));
  sealed.set_manifest_bytes(static_cast<int64_t>(manifest.size()));
  return SendMessage(control_fd, event.SerializeAsString(), fds);
}

void WaitForTheEnd(int control_fd) {
  absl::StatusOr<SocketMessage> message = ReceiveMessage(control_fd);
  while (message.ok() && !message->closed) message = ReceiveMessage(control_fd);
}

}  // namespace weightbroker
