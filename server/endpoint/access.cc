#include "server/endpoint/access.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr const char* kOperationNames[kOperationCount] = {"read", "register", "publish", "admin"};

bool IsAlwaysAllowed(const Peer& peer) { return peer.uid == 0 || peer.uid == geteuid(); }

bool IsListed(const std::set<uid_t>& uids, const std::set<gid_t>& gids, const Peer& peer,
              const std::vector<gid_t>& groups) {
  const auto is_allowed = [&gids](gid_t gid) { return gids.count(gid) > 0; };
  return uids.count(peer.uid) > 0 || is_allowed(peer.gid) || std::any_of(groups.begin(), groups.end(), is_allowed);
}

}  // namespace

const char* OperationName(Operation operation) { return kOperationNames[static_cast<size_t>(operation)]; }

absl::Status CheckAccess(const AccessPolicy& policy, const Peer& peer, const std::vector<gid_t>& groups) {
  if (policy.allowed_uids.empty() && policy.allowed_gids.empty()) return absl::OkStatus();
  if (IsAlwaysAllowed(peer) || IsListed(policy.allowed_uids, policy.allowed_gids, peer, groups)) {
    return absl::OkStatus();
  }
  return MakeError(Reason::kAccessDenied,
                   absl::StrCat("user ", peer.uid, " (group ", peer.gid,
                                ") may not use this service: its operator lists who may with --allowed_uids and "
                                "--allowed_gids"),
                   {{"uid", absl::StrCat(peer.uid)}, {"gid", absl::StrCat(peer.gid)}});
}

absl::Status CheckOperation(const AccessPolicy& policy, Operation operation, const Peer& peer) {
  const UserList& list = policy.list(operation);
  if (list.empty() || IsAlwaysAllowed(peer)) return absl::OkStatus();
  static const std::vector<gid_t>* const kNoGroups = new std::vector<gid_t>();
  if (IsListed(list.uids, list.gids, peer, peer.details != nullptr ? peer.details->groups : *kNoGroups)) {
    return absl::OkStatus();
  }
  const std::string name = OperationName(operation);
  return MakeError(
      Reason::kAccessDenied,
      absl::StrCat("user ", peer.uid, " (group ", peer.gid, ") may not ", name,
                   " here: the service's operator lists who may with --", name, "_uids and --", name, "_gids"),
      {{"operation", name},
       {"uid", absl::StrCat(peer.uid)},
       {"gid", absl::StrCat(peer.gid)},
       {"flag", absl::StrCat(name, "_uids")}});
}

}  // namespace weightbroker
