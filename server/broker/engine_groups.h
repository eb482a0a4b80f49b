// The engine groups that the broker keeps: their names, whom they belong to, and the descriptors of their pages. What
// happens in a group happens in its page, among its members; this reads it for operators and for nothing else.
//
//   EngineGroups groups({.vault = &vault, .clock = &clock, .is_resident = ...});
//   groups.Adopt(std::move(adoption.groups));
//   ASSIGN_OR_RETURN(const EngineGroups::Joined joined, groups.Join(request, peer));     // GROUP_MISMATCH, ...
//
// Thread-safe. Join and Remove wait for the vault. Runs a thread that looks at the pages twice a second, logs who has
// become active, and counts takeovers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/group/page.h"
#include "server/broker/clock.h"
#include "server/broker/vault.h"
#include "server/endpoint/peer.h"
#include "server/endpoint/ticket_box.h"
#include "weightbroker/v1/weight_broker_group_service.pb.h"

namespace weightbroker {

// For the metrics.
struct GroupTotals {
  int groups = 0;
  std::map<std::string, int> members_by_role;         // every role, also those with 0
  std::map<std::string, int64_t> takeovers_by_cause;  // "died", "hung", "left"; of groups that are gone, too
};

struct EngineGroupsOptions {
  ShardVault* vault = nullptr;   // must outlive the groups
  const Clock* clock = nullptr;  // likewise
  std::function<bool(const std::string& fingerprint)> is_resident;
};

class EngineGroups {
 public:
  struct Joined {
    v1::EngineGroup group;
    SharedFds page;  // one descriptor
  };

  explicit EngineGroups(EngineGroupsOptions options);
  ~EngineGroups();
  EngineGroups(const EngineGroups&) = delete;
  EngineGroups& operator=(const EngineGroups&) = delete;

  // Takes over what the broker before this one kept. A page that is not to be used is refused, logged and forgotten.
  // Gives how many were adopted. Before anybody calls.
  int Adopt(std::vector<KeptGroup> kept);

  // Finds the group or makes it. INVALID_ARGUMENT; ACCESS_DENIED for another user; GROUP_MISMATCH for other weights or
  // another time-out; NOT_RESIDENT and GROUP_FULL for a new one, or what the vault says.
  absl::StatusOr<Joined> Join(const v1::JoinGroupRequest& request, const Peer& peer);

  // Those that `peer` may join, by name.
  std::vector<v1::EngineGroup> List(const Peer& peer) const;

  // GROUP_UNKNOWN; ACCESS_DENIED unless `peer` owns it or is root; GROUP_IN_USE.
  absl::StatusOr<v1::EngineGroup> Remove(const v1::RemoveGroupRequest& request, const Peer& peer);

  // As the pages are now.
  GroupTotals Totals();

  // Looks at every page now, as the thread does by itself.
  void Look();

 private:
  struct Group;
  using GroupPtr = std::shared_ptr<Group>;

  absl::StatusOr<GroupPtr> FindOrAdd(const v1::JoinGroupRequest& request, const Peer& peer, bool* added);
  absl::StatusOr<GroupPtr> Add(const v1::JoinGroupRequest& request, const Peer& peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<GroupPtr> Make(const KeptGroup& facts) const;
  absl::Status Keep(const GroupPtr& group);
  void LookAt(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(look_mutex_);
  void Watch();
  std::vector<GroupPtr> All() const;

  const EngineGroupsOptions options_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, GroupPtr> groups_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  Mutex look_mutex_;  // what was last seen of each page
  std::map<std::string, int64_t> takeovers_by_cause_ ABSL_GUARDED_BY(look_mutex_) = {
      {"died", 0}, {"hung", 0}, {"left", 0}};

  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace weightbroker
