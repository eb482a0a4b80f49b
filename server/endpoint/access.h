// Who may connect to the service.
#pragma once

#include <sys/types.h>

#include <set>
#include <vector>

#include "absl/status/status.h"
#include "server/endpoint/peer.h"

namespace weightbroker {

// Both empty: whoever the socket's mode lets in. Otherwise the peer's uid, or one of its groups (primary or
// supplementary), must be listed. The service's own uid and root always may.
struct AccessPolicy {
  std::set<uid_t> allowed_uids;
  std::set<gid_t> allowed_gids;
};

// Ok, or ACCESS_DENIED naming the peer. `groups` are its supplementary groups.
absl::Status CheckAccess(const AccessPolicy& policy, const Peer& peer, const std::vector<gid_t>& groups);

}  // namespace weightbroker
