// Hot standby: any number of engines on the same weights on one machine, of which one is active. When it dies, hangs or
// leaves, another takes over, and the one that hung finds itself fenced when it comes back.
//
//   weightbroker::GroupOptions options;
//   options.name = "llama";
//   options.fingerprint = weights->fingerprint();               // attached before, so that there is nothing left to do
//   auto member = weightbroker::EngineGroupMember::Join(options);
//   if (!member.ok()) return Fail(member.status());             // GROUP_MISMATCH: the group is of other weights; ...
//   auto epoch = member->WaitUntilActive(std::chrono::hours(24));
//   if (!epoch.ok()) return Fail(epoch.status());
//   while (member->IsActive(*epoch)) Answer(NextRequest(), *epoch);      // the epoch goes along to whatever is written
//   to
//
// The service only hands out the page that the members share. Who is active, and what becomes of one that is not there
// any more, the members settle in it among themselves: it goes on while the service is away, and takes no call.
//
// An epoch has at most one active member and is never used again. IsActive is true or false at the moment of asking; a
// process can stop between asking and acting, and nothing in it can prevent that. So pass the epoch to what you write
// to (a database, a queue, a lock's holder), and have that refuse an epoch below the greatest that it has seen.
//
// The members of a group share memory that all of them can write to: they trust each other, as processes of one user
// do. C++17. All of a member is thread-safe but moving and destroying it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "weightbroker/export.h"
#include "weightbroker/status.h"

namespace weightbroker {

namespace client {
class GroupMemberState;
}

enum class GroupRole {
  kStandby,     // waits for its turn
  kActive,      // acts
  kSuperseded,  // was active, gave no heartbeat in time, and has been taken over from; a standby again after Rejoin
  kLeft,        // is no member any more; status() says why
};

struct GroupOptions {
  std::string name;         // 1 to 64 letters, digits, '.', '_' or '-'; the group is made if there is none of it
  std::string fingerprint;  // of the weights that this engine has: MappedWeights::fingerprint()
  // After how long without a heartbeat a member counts as hung: 20 ms to 1 minute, the same for all members. 0: as the
  // group has it, and 200 ms for a new one. Four heartbeats are given in that time.
  std::chrono::milliseconds heartbeat_timeout{0};
  // Whether the engine gives the heartbeats itself, by Beat. Otherwise a thread of this library gives them: then a
  // member hangs only if its whole process does.
  bool beats_itself = false;
  // Where the group is made: whether engines of users whose primary group this is may join, besides those of this user.
  bool allows_group = false;
  gid_t allowed_group = 0;
  // Where the service listens; as ClientOptions::socket_path, but for one service ("{gpu_uuid}" is not replaced).
  std::string socket_path;
  // For reaching the service and getting the page.
  std::chrono::milliseconds deadline{10'000};
};

class WEIGHTBROKER_EXPORT EngineGroupMember {
 public:
  // Gets the group's page from the service, making the group if need be, and takes a seat in it behind all others.
  // Later calls need no service. INVALID_ARGUMENT; GROUP_MISMATCH if the group is of other weights or has another
  // time-out; NOT_RESIDENT if it is to be made and the weights are not there; ACCESS_DENIED for another user's;
  // GROUP_FULL; GROUP_PAGE_INVALID; SERVICE_UNAVAILABLE, DEADLINE_EXCEEDED, ...
  static Result<EngineGroupMember> Join(const GroupOptions& options);

  EngineGroupMember(EngineGroupMember&&) noexcept;
  EngineGroupMember& operator=(EngineGroupMember&&) noexcept;
  ~EngineGroupMember();  // leaves

  // Whether this member is active, and `epoch` is what it is active in, at this moment. Costs two loads, of which one
  // is of memory that changes only when the active member does: for every request, and before every write. False as
  // soon as another has taken over, also in a process that was stopped meanwhile; false in a forked child.
  bool IsActive(uint64_t epoch) const;

  // As of the last look of this member's thread, which is behind by as much as a thread takes to wake up; and of a
  // process that was stopped and goes on, by that, too. Before acting ask IsActive.
  GroupRole role() const;

  // The epoch in which this member is active, or was when it was superseded; 0 if it never was.
  uint64_t epoch() const;

  // Ok while it is a member. Else why it is not: CANCELLED after Leave, GROUP_PAGE_INVALID if the page has contents
  // that no member writes.
  Status status() const;

  // Waits until this member is active, and gives the epoch; at once if it is. DEADLINE_EXCEEDED after `timeout`;
  // GROUP_SUPERSEDED; or what status() says. Leave, from another thread, ends the wait.
  Result<uint64_t> WaitUntilActive(std::chrono::milliseconds timeout) const;

  // For event loops: becomes readable when role or epoch change. Read 8 bytes from it, then ask. It belongs to the
  // member: do not close it.
  int event_fd() const;

  // Gives the active role up for another, who takes over at once; this one stands by behind all others, and becomes
  // active again, in a new epoch, if it is alone. Nothing happens to a member that is not active.
  void StepDown();

  // Makes a superseded member a standby behind all others. First drop what was begun in the old epoch. Ok, and nothing
  // happens, in another role; what status() says after it has left.
  Status Rejoin();

  // Leaves the group: if active, another takes over at once. Returns when it has. Harmless twice.
  void Leave();

  // Gives a heartbeat, with GroupOptions::beats_itself: several times within the time-out. One store.
  void Beat();

  std::chrono::nanoseconds heartbeat_timeout() const;

 private:
  explicit EngineGroupMember(std::unique_ptr<client::GroupMemberState> state);

  std::unique_ptr<client::GroupMemberState> state_;
};

}  // namespace weightbroker
