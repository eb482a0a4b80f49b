// Starts programs, holding nothing back that the child must not have.
//
//   auto loader = Spawn({.path = loader_path, .arguments = {"--control_fd=3"}, .fds = {{control.get(), 3}}});
//   if (!loader.ok()) return loader.status();                // SYSTEM_ERROR naming the path
//   ... poll loader->pidfd() for POLLIN: the child has ended ...
//   auto exit = loader->Wait(std::chrono::seconds(5));        // DEADLINE_EXCEEDED if it is still running
//
// The child gets the descriptors that are named and stdin, stdout and stderr, and no other; every signal unblocked and
// at its default; and a process group of its own, so that Ctrl-C at a terminal reaches its parent alone, which passes
// it on once. It never forks: that is not safe once gRPC or CUDA has started.
//
// Spawn is thread-safe. A ChildProcess is not.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

// The child's descriptor `child_fd` is what `parent_fd` is here. The parent's stays the parent's.
struct FdMapping {
  int parent_fd = -1;
  int child_fd = -1;
};

struct SpawnOptions {
  std::string path = {};                    // not looked up in PATH
  std::vector<std::string> arguments = {};  // after argv[0], which is `path`
  // What the child gets besides stdin (/dev/null), stdout and stderr (ours), each of which may be mapped too. Child
  // numbers must differ from each other, be under 1,000, and leave room under RLIMIT_NOFILE for a copy of each above
  // the highest of them.
  std::vector<FdMapping> fds = {};
};

// How a process ended.
struct ExitStatus {
  std::optional<int> code;    // what it returned
  std::optional<int> signal;  // or what killed it

  // From what waitpid gives.
  static ExitStatus FromWaitStatus(int wait_status);

  bool success() const { return code == 0; }
  // As a shell says it: the code, or 128 and the signal.
  int shell_code() const;
  // "exit code 3" or "killed by SIGSEGV".
  std::string ToString() const;
};

// A child that has been started. Move-only.
class ChildProcess {
 public:
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  // Kills the child (SIGKILL) unless it has been waited for, and reaps it: no zombie and no stray is left.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // Readable (POLLIN) once the child has ended. Valid as long as this object.
  int pidfd() const { return pidfd_.get(); }

  // Gives the child up: whoever calls this sees to it from here on. Returns the pidfd.
  UniqueFd Release() &&;

  // Sends a signal. Ok too if the child has ended already: it never reaches another process that got its number.
  absl::Status Kill(int signal);

  // Waits until the child ends, and reaps it; without a limit if `timeout` is not given, and not at all if it is zero.
  // DEADLINE_EXCEEDED if it is still running then. Once it has ended every call gives the same answer.
  absl::StatusOr<ExitStatus> Wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt);

 private:
  friend absl::StatusOr<ChildProcess> Spawn(const SpawnOptions& options);
  ChildProcess(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  void KillAndReap();

  pid_t pid_ = -1;  // -1 once moved from
  UniqueFd pidfd_;
  std::optional<ExitStatus> exit_;
};

// Starts a program. SYSTEM_ERROR naming the path and the errno if it cannot be started; INVALID_ARGUMENT for mappings
// that contradict each other.
absl::StatusOr<ChildProcess> Spawn(const SpawnOptions& options);

// The path of a program that is installed in the same folder as the one that is running. The folder is what counts, not
// the file: /proc/self/exe is the old file after an upgrade.
absl::StatusOr<std::string> PathBesideThisProgram(const std::string& program);

}  // namespace weightbroker
