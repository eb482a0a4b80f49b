// Who may connect to the service, and what they may do there: the one place where that is decided. Credentials are the
// kernel's, never the caller's word.
//
//   RETURN_IF_ERROR(CheckAccess(policy, peer, groups));                        // when it connects
//   RETURN_IF_ERROR(CheckOperation(policy, Operation::kRegister, peer));       // at each call
//
// Thread-safe: pure.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "server/endpoint/peer.h"

namespace weightbroker {

// What a call does, as far as access goes.
enum class Operation {
  kRead,        // Export, Fingerprint, Health, ListWeightSets, ReportDamage
  kRegister,    // Register without an offer to publish
  kPublish,     // Register with one, AllocateSlabs, Commit
  kAdminister,  // Unregister, Scrub
};
inline constexpr size_t kOperationCount = 4;

// "read", "register", "publish", "admin": as the flags begin.
const char* OperationName(Operation operation);

struct UserList {
  std::set<uid_t> uids;
  std::set<gid_t> gids;

  bool empty() const { return uids.empty() && gids.empty(); }
};

// An empty list is one that leaves it open: whoever the socket's mode lets in may connect, and whoever may connect may
// do everything. Otherwise the peer's uid, or one of its groups (primary or supplementary), must be listed. The
// service's own uid and root always may.
struct AccessPolicy {
  std::set<uid_t> allowed_uids;
  std::set<gid_t> allowed_gids;
  std::array<UserList, kOperationCount> operations = {};  // by Operation

  const UserList& list(Operation operation) const { return operations[static_cast<size_t>(operation)]; }
};

// Ok, or ACCESS_DENIED naming the peer. `groups` are its supplementary groups.
absl::Status CheckAccess(const AccessPolicy& policy, const Peer& peer, const std::vector<gid_t>& groups);

// Ok, or ACCESS_DENIED naming the operation, the peer and the flags that list who may.
absl::Status CheckOperation(const AccessPolicy& policy, Operation operation, const Peer& peer);

}  // namespace weightbroker
