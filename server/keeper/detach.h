// Lets this program go on in the background while the command that was typed ends.
//
//   auto detached = Detached::Enter();                  // the command waits in here, and never returns from it
//   if (!detached.ok()) return detached.status();
//   ... what the command should wait for ...
//   std::move(*detached).Report(0);                     // the command exits with 0; or with what this process exits
//   with
//
// Only for a process of one thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

class Detached {
 public:
  // Returns in a child that is in a session of its own, with no terminal and nothing on stdin, allowed on every CPU and
  // every memory node, however the caller is pinned, and without a service manager: that one started somebody else.
  // stdout and stderr are the caller's. SYSTEM_ERROR, in the caller, if there is no process to be had.
  static absl::StatusOr<Detached> Enter();

  // Ends the command with this exit code. Without it, it ends with 1 when this process does.
  void Report(int exit_code) &&;

 private:
  explicit Detached(UniqueFd command) : command_(std::move(command)) {}

  UniqueFd command_;  // a pipe that the command reads one byte from
};

}  // namespace weightbroker
