// Starts loaders, behind an interface: the broker may start them itself or ask another process to.
//
//   ASSIGN_OR_RETURN(SpawnedLoader loader, spawner.Spawn(request));
//   ... talk over loader.control_socket (see protos/weightbroker/internal/v1/loader.proto) ...
//   loader.process->WaitForEnd(std::chrono::seconds(1));      // "exit code 3", or empty if not known
//
// Spawn is thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// A loader that has been started. Thread-safe. Its end kills the loader if that still runs and is not detached, and
// leaves no zombie.
class LoaderProcess {
 public:
  virtual ~LoaderProcess() = default;

  // Ends it at once, and says in the log that this was done, and why: elsewhere in the log stands only that it was
  // killed. Nothing if it has ended.
  virtual void Kill(const std::string& cause) = 0;

  // From now on it lives until its control socket is closed everywhere, or until its spawner's own end: neither the end
  // of this object nor, where a keeper spawned it, of this broker kills it. KEEPER_REFUSED if it has ended.
  virtual absl::Status Detach() = 0;

  // Waits at most `timeout` until it ends, and says how for people; empty if it still runs or nobody knows.
  virtual std::string WaitForEnd(std::chrono::milliseconds timeout) = 0;

 protected:
  // For Kill.
  static void LogKill(pid_t pid, const std::string& cause);
};

// Has a loader that is of no more use end: one that `has_said_so`, since it has failed by itself, in its own time, any
// other at once, for `cause`. Returns when it has ended, or after `grace`.
void EndLoader(LoaderProcess& loader, bool has_said_so, const std::string& cause, std::chrono::milliseconds grace);

struct SpawnedLoader {
  UniqueFd control_socket;  // the broker's end
  std::unique_ptr<LoaderProcess> process;
};

class LoaderSpawner {
 public:
  virtual ~LoaderSpawner() = default;

  // Starts a loader that has `request` and the other end of the control socket. SYSTEM_ERROR if it cannot be started.
  virtual absl::StatusOr<SpawnedLoader> Spawn(const internal::v1::LoadRequest& request) = 0;
};

// Starts the program at `loader_path` as a child of this process.
std::unique_ptr<LoaderSpawner> NewProcessLoaderSpawner(std::string loader_path);

}  // namespace weightbroker
