// The outside observer of standby_bench: starts members, ends or stops the active one, and sees when another has taken
// over, and when it would have known by other means that the first is gone.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/standby/member.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"

namespace weightbroker::bench {

// A member and the observer's ends of its sockets.
class WatchedMember {
 public:
  static absl::StatusOr<WatchedMember> Start(const MemberFlags& flags);

  // Waits for that step. INTERNAL if it ends first or takes longer than `seconds`.
  absl::StatusOr<MemberReport> WaitFor(MemberReport::Step step, double seconds = 300);

  ChildProcess& process() { return process_; }
  int report_fd() const { return report_.get(); }
  int silent_fd() const { return silent_.get(); }

 private:
  WatchedMember(ChildProcess process, UniqueFd report, UniqueFd silent)
      : process_(std::move(process)), report_(std::move(report)), silent_(std::move(silent)) {}

  ChildProcess process_;
  UniqueFd report_;
  UniqueFd silent_;
};

// Seconds by what they are of.
using Sample = std::map<std::string, double>;

// Kills the active member, which holds its memory, and gives, each from just before the kill: when the observer had the
// standby's word that it is active and has read weights ("takeover"), when that was by the standby's own clock
// ("woken", "first_read"), when the silent socket was closed ("socket_close"), and when the pidfd told ("pidfd").
absl::StatusOr<Sample> TimeDeath(WatchedMember& active, WatchedMember& standby);

// Stops the active member; the same, but for socket and pidfd. Then lets it go on, and waits until it says that it is
// fenced ("fenced_after_continue", from that).
absl::StatusOr<Sample> TimeHang(WatchedMember& active, WatchedMember& standby);

}  // namespace weightbroker::bench
