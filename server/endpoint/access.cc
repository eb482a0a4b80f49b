#include "server/endpoint/access.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {

absl::Status CheckAccess(const AccessPolicy& policy, const Peer& peer, const std::vector<gid_t>& groups) {
  if (policy.allowed_uids.empty() && policy.allowed_gids.empty()) return absl::OkStatus();
  if (peer.uid == 0 || peer.uid == geteuid() || policy.allowed_uids.count(peer.uid) > 0) return absl::OkStatus();
  const auto is_allowed = [&policy](gid_t gid) { return policy.allowed_gids.count(gid) > 0; };
  if (is_allowed(peer.gid) || std::any_of(groups.begin(), groups.end(), is_allowed)) return absl::OkStatus();
  return MakeError(Reason::kAccessDenied,
                   absl::StrCat("user ", peer.uid, " (group ", peer.gid,
                                ") may not use this service: its operator lists who may with --allowed_uids and "
                                "--allowed_gids"),
                   {{"uid", absl::StrCat(peer.uid)}, {"gid", absl::StrCat(peer.gid)}});
}

}  // namespace weightbroker
