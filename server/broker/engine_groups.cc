#include "server/broker/engine_groups.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

using std::chrono::nanoseconds;

constexpr size_t kMaxGroups = 256;
constexpr size_t kMaxNameBytes = 64;
constexpr std::chrono::milliseconds kLookInterval(500);
constexpr int64_t kNanoseconds = 1'000'000'000;
// A page that says of more takeovers between two looks is not believed.
constexpr uint64_t kMaxTakeoversInALook = 100'000;

void SetDuration(nanoseconds duration, google::protobuf::Duration* proto) {
  proto->set_seconds(duration.count() / kNanoseconds);
  proto->set_nanos(static_cast<int32_t>(duration.count() % kNanoseconds));
}

absl::Status CheckName(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  if (!name.empty() && name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), allowed)) {
    return absl::OkStatus();
  }
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat(Quote(name), " is no name of an engine group: 1 to ", kMaxNameBytes,
                                " letters, digits, '.', '_' or '-'"),
                   {{"field", "name"}});
}

// Seconds and nanoseconds as they were sent, which may be anything.
absl::StatusOr<nanoseconds> ReadTimeout(const v1::JoinGroupRequest& request) {
  if (!request.has_heartbeat_timeout()) return nanoseconds(group::kDefaultTimeout);
  const google::protobuf::Duration& sent = request.heartbeat_timeout();
  const bool in_range = sent.seconds() >= 0 && sent.seconds() <= 60 && sent.nanos() >= 0 && sent.nanos() < kNanoseconds;
  const nanoseconds timeout(in_range ? sent.seconds() * kNanoseconds + sent.nanos() : 0);
  if (timeout >= group::kLeastTimeout && timeout <= group::kGreatestTimeout) return timeout;
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("a heartbeat time-out of ", sent.seconds(), " s and ", sent.nanos(),
                                " ns is out of range: ", group::kLeastTimeout.count(), " ms to ",
                                group::kGreatestTimeout.count(), " ms"),
                   {{"field", "heartbeat_timeout"}});
}

bool Owns(const KeptGroup& group, const Peer& peer) { return peer.uid == 0 || peer.uid == group.owner_uid; }

bool MayJoin(const KeptGroup& group, const Peer& peer) { return Owns(group, peer) || group.allowed_gid == peer.gid; }

absl::Status DeniedError(const KeptGroup& group, const Peer& peer) {
  return MakeError(
      Reason::kAccessDenied,
      absl::StrCat("the engine group ", group.name, " belongs to user ", group.owner_uid, "; this is user ", peer.uid),
      {{"group", group.name}, {"owner_uid", absl::StrCat(group.owner_uid)}, {"uid", absl::StrCat(peer.uid)}});
}

absl::Status CheckSame(const KeptGroup& group, const v1::JoinGroupRequest& request, nanoseconds timeout) {
  if (group.fingerprint != request.fingerprint()) {
    return MakeError(
        Reason::kGroupMismatch,
        absl::StrCat("the engine group ", group.name, " is of the weights ", group.fingerprint, ", not of ",
                     Quote(request.fingerprint()), ": join another group, or attach to those weights"),
        {{"group", group.name},
         {"field", "fingerprint"},
         {"requested", Printable(request.fingerprint())},
         {"found", group.fingerprint}});
  }
  if (request.has_heartbeat_timeout() && timeout != group.heartbeat_timeout) {
    return MakeError(
        Reason::kGroupMismatch,
        absl::StrCat("the engine group ", group.name, " has a heartbeat time-out of ", group.heartbeat_timeout.count(),
                     " ns, not of ", timeout.count(), " ns: leave it out to take the group's"),
        {{"group", group.name},
         {"field", "heartbeat_timeout"},
         {"requested", absl::StrCat(timeout.count())},
         {"found", absl::StrCat(group.heartbeat_timeout.count())}});
  }
  return absl::OkStatus();
}

v1::GroupMember::Role RoleOf(group::MemberRole role) {
  switch (role) {
    case group::MemberRole::kActive:
      return v1::GroupMember::ROLE_ACTIVE;
    case group::MemberRole::kSuperseded:
      return v1::GroupMember::ROLE_SUPERSEDED;
    case group::MemberRole::kStandby:
      break;
  }
  return v1::GroupMember::ROLE_STANDBY;
}

const char* RoleName(group::MemberRole role) {
  switch (role) {
    case group::MemberRole::kActive:
      return "active";
    case group::MemberRole::kSuperseded:
      return "superseded";
    case group::MemberRole::kStandby:
      break;
  }
  return "standby";
}

// What was last seen of a page.
struct Sight {
  uint64_t epoch = 0;
  uint64_t died = 0;
  uint64_t hung = 0;
  uint64_t left = 0;
  bool invalid = false;
};

}  // namespace

struct EngineGroups::Group {
  Group(KeptGroup kept_facts, group::GroupPage mapped) : facts(std::move(kept_facts)), page(std::move(mapped)) {}

  v1::EngineGroup Describe() const {
    v1::EngineGroup proto;
    proto.set_name(facts.name);
    proto.set_fingerprint(facts.fingerprint);
    proto.set_owner_uid(facts.owner_uid);
    if (facts.allowed_gid.has_value()) proto.set_allowed_gid(*facts.allowed_gid);
    SetDuration(facts.heartbeat_timeout, proto.mutable_heartbeat_timeout());
    SetTimestamp(facts.create_time, proto.mutable_create_time());
    const auto view = page.Read(SteadyNanoseconds());
    if (!view.ok()) {
      proto.set_page_error(std::string(view.status().message()));
      return proto;
    }
    proto.set_epoch(static_cast<int64_t>(view->epoch));
    for (const group::MemberView& member : view->members) {
      v1::GroupMember* const described = proto.add_members();
      described->set_role(RoleOf(member.role));
      described->set_process_id(member.process_id);
      described->set_join_sequence(static_cast<int64_t>(member.join_sequence));
      SetDuration(member.heartbeat_age, described->mutable_heartbeat_age());
      described->set_hung(member.hung);
    }
    proto.mutable_takeovers()->set_died(static_cast<int64_t>(view->died));
    proto.mutable_takeovers()->set_hung(static_cast<int64_t>(view->hung));
    proto.mutable_takeovers()->set_left(static_cast<int64_t>(view->left));
    return proto;
  }

  const KeptGroup facts;
  const group::GroupPage page;
  bool is_kept = false;  // under EngineGroups::mutex_: the next broker has it, and it may be given out
  bool is_gone = false;  // likewise: it is not to be given out any more
  Sight seen;            // under EngineGroups::look_mutex_
};

EngineGroups::EngineGroups(EngineGroupsOptions options)
    : options_(std::move(options)), watcher_(StartThreadOrExit("engine groups", [this] { Watch(); })) {}

EngineGroups::~EngineGroups() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  watcher_.join();
}

int EngineGroups::Adopt(std::vector<KeptGroup> kept) {
  int adopted = 0;
  for (KeptGroup& facts : kept) {
    const std::string name = facts.name;
    auto group = Make(facts);
    if (!group.ok()) {
      Log(LogLevel::kError, "adoption.refused",
          {{"group", name},
           {"reason", GetErrorDetails(group.status()).reason},
           {"message", std::string(group.status().message())}});
      options_.vault->ForgetGroup(name).IgnoreError();
      continue;
    }
    ++adopted;
    Log(LogLevel::kInfo, "group.adopted", {{"group", name}, {"fingerprint", facts.fingerprint}});
    const MutexLock lock(mutex_);
    (*group)->is_kept = true;
    groups_[name] = *std::move(group);
    changed_.NotifyAll();
  }
  return adopted;
}

// The page of `facts`, as it says of itself what they say.
absl::StatusOr<EngineGroups::GroupPtr> EngineGroups::Make(const KeptGroup& facts) const {
  ASSIGN_OR_RETURN(group::GroupPage page, group::GroupPage::Map(facts.page->front().get()));
  if (page.facts().fingerprint != facts.fingerprint || page.facts().heartbeat_timeout != facts.heartbeat_timeout) {
    return group::PageError("its fingerprint or its heartbeat time-out is not the group's");
  }
  return std::make_shared<Group>(facts, std::move(page));
}

absl::StatusOr<EngineGroups::Joined> EngineGroups::Join(const v1::JoinGroupRequest& request, const Peer& peer) {
  bool added = false;
  ASSIGN_OR_RETURN(const GroupPtr group, FindOrAdd(request, peer, &added));
  if (added) RETURN_IF_ERROR(Keep(group));
  {
    const MutexLock lock(mutex_);
    while (!group->is_kept && !group->is_gone) changed_.Wait(mutex_);
    if (group->is_gone) {
      return MakeError(Reason::kGroupUnknown,
                       absl::StrCat("the engine group ", group->facts.name, " was removed just now: join again"),
                       {{"group", group->facts.name}});
    }
  }
  Log(LogLevel::kInfo, "group.joined",
      {{"group", group->facts.name}, {"uid", absl::StrCat(peer.uid)}, {"peer_pid", absl::StrCat(peer.pid)}});
  return Joined{group->Describe(), group->facts.page};
}

absl::StatusOr<EngineGroups::GroupPtr> EngineGroups::FindOrAdd(const v1::JoinGroupRequest& request, const Peer& peer,
                                                               bool* added) {
  RETURN_IF_ERROR(CheckName(request.name()));
  ASSIGN_OR_RETURN(const nanoseconds timeout, ReadTimeout(request));
  const bool is_resident = options_.is_resident(request.fingerprint());
  const MutexLock lock(mutex_);
  const auto found = groups_.find(request.name());
  if (found != groups_.end()) {
    const KeptGroup& facts = found->second->facts;
    if (!MayJoin(facts, peer)) return DeniedError(facts, peer);
    RETURN_IF_ERROR(CheckSame(facts, request, timeout));
    return found->second;
  }
  if (!is_resident) {
    return MakeError(Reason::kNotResident,
                     absl::StrCat("no weight set with fingerprint ", Quote(request.fingerprint()),
                                  " is resident, on which an engine group could be made: attach first"),
                     {{"fingerprint", Printable(request.fingerprint())}});
  }
  *added = true;
  return Add(request, peer);
}

absl::StatusOr<EngineGroups::GroupPtr> EngineGroups::Add(const v1::JoinGroupRequest& request, const Peer& peer) {
  if (groups_.size() >= kMaxGroups) {
    return MakeError(Reason::kGroupFull,
                     absl::StrCat("the service keeps ", kMaxGroups,
                                  " engine groups, which is all that it may: remove "
                                  "those that nobody needs"),
                     {{"limit", absl::StrCat(kMaxGroups)}});
  }
  KeptGroup facts;
  facts.name = request.name();
  facts.fingerprint = request.fingerprint();
  facts.owner_uid = peer.uid;
  if (request.has_allowed_gid()) facts.allowed_gid = request.allowed_gid();
  ASSIGN_OR_RETURN(facts.heartbeat_timeout, ReadTimeout(request));
  facts.create_time = options_.clock->WallNow();
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(facts.create_time.time_since_epoch()).count();
  ASSIGN_OR_RETURN(UniqueFd fd, group::CreateGroupPage({.fingerprint = facts.fingerprint,
                                                        .heartbeat_timeout = facts.heartbeat_timeout,
                                                        .first_epoch = static_cast<uint64_t>(milliseconds)}));
  auto page = std::make_shared<std::vector<UniqueFd>>();
  page->push_back(std::move(fd));
  facts.page = std::move(page);
  ASSIGN_OR_RETURN(GroupPtr group, Make(facts));
  groups_[facts.name] = group;
  return group;
}

// Nobody gets the page before it is safe: engines that had it while the next broker makes another would be two groups.
absl::Status EngineGroups::Keep(const GroupPtr& group) {
  const absl::Status kept = options_.vault->KeepGroup(group->facts);
  {
    const MutexLock lock(mutex_);
    group->is_kept = kept.ok();
    group->is_gone = !kept.ok();
    if (!kept.ok()) groups_.erase(group->facts.name);
    changed_.NotifyAll();
  }
  if (!kept.ok()) {
    options_.vault->ForgetGroup(group->facts.name).IgnoreError();
    return kept;
  }
  Log(LogLevel::kInfo, "group.made",
      {{"group", group->facts.name},
       {"fingerprint", group->facts.fingerprint},
       {"uid", absl::StrCat(group->facts.owner_uid)},
       {"heartbeat_timeout_ms", absl::StrCat(group->facts.heartbeat_timeout.count() / 1'000'000)}});
  return absl::OkStatus();
}

std::vector<v1::EngineGroup> EngineGroups::List(const Peer& peer) const {
  std::vector<v1::EngineGroup> described;
  for (const GroupPtr& group : All()) {
    if (MayJoin(group->facts, peer)) described.push_back(group->Describe());
  }
  return described;
}

absl::StatusOr<v1::EngineGroup> EngineGroups::Remove(const v1::RemoveGroupRequest& request, const Peer& peer) {
  v1::EngineGroup described;
  {
    const MutexLock lock(mutex_);
    const auto found = groups_.find(request.name());
    if (found == groups_.end()) {
      return MakeError(Reason::kGroupUnknown, absl::StrCat("there is no engine group ", Quote(request.name())),
                       {{"group", Printable(request.name())}});
    }
    const GroupPtr group = found->second;
    if (!Owns(group->facts, peer)) return DeniedError(group->facts, peer);
    described = group->Describe();
    if (!described.members().empty() && !request.force()) {
      return MakeError(Reason::kGroupInUse,
                       absl::StrCat("the engine group ", group->facts.name, " has ", described.members_size(),
                                    " members: end them, or remove it by force"),
                       {{"group", group->facts.name}, {"members", absl::StrCat(described.members_size())}});
    }
    group->is_gone = true;
    groups_.erase(found);
    changed_.NotifyAll();
  }
  RETURN_IF_ERROR(options_.vault->ForgetGroup(request.name()));
  Log(LogLevel::kInfo, "group.removed",
      {{"group", described.name()},
       {"members", absl::StrCat(described.members_size())},
       {"epoch", absl::StrCat(described.epoch())},
       {"uid", absl::StrCat(peer.uid)},
       {"peer_pid", absl::StrCat(peer.pid)}});
  return described;
}

GroupTotals EngineGroups::Totals() {
  Look();
  GroupTotals totals;
  {
    const MutexLock lock(look_mutex_);
    totals.takeovers_by_cause = takeovers_by_cause_;
  }
  totals.members_by_role = {{"active", 0}, {"standby", 0}, {"superseded", 0}};
  for (const GroupPtr& group : All()) {
    ++totals.groups;
    const auto view = group->page.Read(SteadyNanoseconds());
    if (!view.ok()) continue;
    for (const group::MemberView& member : view->members) ++totals.members_by_role[RoleName(member.role)];
  }
  return totals;
}

void EngineGroups::Look() {
  const MutexLock lock(look_mutex_);
  for (const GroupPtr& group : All()) LookAt(group.get());
}

void EngineGroups::LookAt(Group* group) {
  const auto view = group->page.Read(SteadyNanoseconds());
  Sight& seen = group->seen;
  if (!view.ok()) {
    if (!std::exchange(seen.invalid, true)) {
      Log(LogLevel::kError, "group.page_invalid",
          {{"group", group->facts.name}, {"message", std::string(view.status().message())}});
    }
    return;
  }
  const auto count = [&](const char* cause, uint64_t now, uint64_t* before) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const uint64_t more = now - std::exchange(*before, now);
    if (more > 0 && more <= kMaxTakeoversInALook) takeovers_by_cause_[cause] += static_cast<int64_t>(more);
    return more;
  };
  const uint64_t died = count("died", view->died, &seen.died);
  const uint64_t hung = count("hung", view->hung, &seen.hung);
  const uint64_t left = count("left", view->left, &seen.left);
  if (view->epoch == std::exchange(seen.epoch, view->epoch) || view->members.empty()) return;
  if (view->members.front().role != group::MemberRole::kActive) return;
  Log(died + hung > 0 ? LogLevel::kWarning : LogLevel::kInfo, "group.active",
      {{"group", group->facts.name},
       {"epoch", absl::StrCat(view->epoch)},
       {"process_id", absl::StrCat(view->members.front().process_id)},
       {"members", absl::StrCat(view->members.size())},
       {"died", absl::StrCat(died)},
       {"hung", absl::StrCat(hung)},
       {"left", absl::StrCat(left)}});
}

void EngineGroups::Watch() {
  while (true) {
    {
      const auto next = std::chrono::steady_clock::now() + kLookInterval;
      const MutexLock lock(mutex_);
      while (!stopping_ && groups_.empty()) changed_.Wait(mutex_);
      while (!stopping_ && changed_.WaitUntil(mutex_, next)) {
      }
      if (stopping_) return;
    }
    Look();
  }
}

std::vector<EngineGroups::GroupPtr> EngineGroups::All() const {
  std::vector<GroupPtr> all;
  const MutexLock lock(mutex_);
  for (const auto& [name, group] : groups_) {
    if (group->is_kept) all.push_back(group);
  }
  return all;
}

}  // namespace weightbroker
