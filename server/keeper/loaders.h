// The loaders that brokers asked for and that have not been reaped yet.
//
//   auto loader = loaders.Spawn(broker_number, arguments, request_fd);
//   ...
//   loaders.Detach(broker_number, pid);      // it is to outlive its broker: an entry has its control socket
//   loaders.KillAllOf(broker_number);        // their broker has ended: nobody reads their control sockets
//   if (auto owner = loaders.OnExited(pid)) ...
//
// Not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

// What the broker gets of a loader.
struct StartedLoader {
  pid_t pid = -1;
  UniqueFd control_socket;
  UniqueFd pidfd;
};

class Loaders {
 public:
  Loaders(std::string path, size_t max_loaders) : path_(std::move(path)), max_loaders_(max_loaders) {}

  // Starts one for the broker with number `owner`, with "--request_fd=3 --control_fd=4" and then `arguments`. Fails
  // with SYSTEM_ERROR naming the path, or KEEPER_REFUSED if there are too many, those that are detached not counted.
  absl::StatusOr<StartedLoader> Spawn(int64_t owner, const std::vector<std::string>& arguments, int request_fd);

  // One that was there before execve.
  void Resume(pid_t pid, int64_t owner) { owners_[pid] = owner; }

  // From now on it is nobody's, and only KillAll ends it. False if it is no loader of `owner`.
  bool Detach(int64_t owner, pid_t pid);

  int KillAllOf(int64_t owner) const;  // gives how many
  void KillAll() const;

  // To be called for each child that has been reaped. The number of the broker it was started for, if it was a loader.
  std::optional<int64_t> OnExited(pid_t pid);

  const std::map<pid_t, int64_t>& owners() const { return owners_; }
  bool empty() const { return owners_.empty(); }

 private:
  static constexpr int64_t kNobody = 0;  // brokers are numbered from 1

  size_t CountOwned() const;

  const std::string path_;
  const size_t max_loaders_;
  std::map<pid_t, int64_t> owners_;  // children that are not reaped, so that their numbers are their own
};

}  // namespace weightbroker
