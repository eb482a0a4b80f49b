#include "server/broker/keeper_loader_spawner.h"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <span>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"
#include "common/process/spawn.h"

namespace weightbroker {

// How loaders have ended, by their number: told by the keeper's thread, asked by a load's.
class KeeperLoaderSpawner::Exits {
 public:
  void Set(pid_t pid, int wait_status) {
    MutexLock lock(mutex_);
    if (nobody_asks_.erase(pid) > 0) return;
    statuses_[pid] = wait_status;
    changed_.NotifyAll();
  }

  // Empty if it is not known in time.
  std::string Wait(pid_t pid, std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (statuses_.count(pid) == 0 && std::chrono::steady_clock::now() < deadline) {
      changed_.WaitUntil(mutex_, deadline);
    }
    const auto found = statuses_.find(pid);
    return found == statuses_.end() ? "" : Describe(found->second);
  }

  // The number may be another process's, once the keeper has said how this one ended.
  void Forget(pid_t pid) {
    MutexLock lock(mutex_);
    if (statuses_.erase(pid) == 0) nobody_asks_.insert(pid);
  }

 private:
  static std::string Describe(int wait_status) {
    ExitStatus exit;
    if (WIFSIGNALED(wait_status)) {
      exit.signal = WTERMSIG(wait_status);
    } else {
      exit.code = WEXITSTATUS(wait_status);
    }
    return exit.ToString();
  }

  Mutex mutex_;
  CondVar changed_;
  std::map<pid_t, int> statuses_ ABSL_GUARDED_BY(mutex_);
  std::set<pid_t> nobody_asks_ ABSL_GUARDED_BY(mutex_);  // whose end is still to be told
};

class KeeperLoaderSpawner::Process : public LoaderProcess {
 public:
  Process(pid_t pid, UniqueFd pidfd, std::shared_ptr<Exits> exits, DetachFunction detach)
      : pid_(pid), pidfd_(std::move(pidfd)), exits_(std::move(exits)), detach_(std::move(detach)) {}

  ~Process() override {
    if (detached_) return;  // the keeper says of no such loader how it ended
    Kill();
    exits_->Forget(pid_);
  }

  absl::Status Detach() override {
    if (!detach_) return MakeError(Reason::kKeeperRefused, "the keeper cannot detach a loader");
    RETURN_IF_ERROR(detach_(pid_));
    detached_ = true;
    return absl::OkStatus();
  }

  // Where the loader is in a PID namespace that this process may not signal into, the closed control socket ends it.
  void Kill() override { syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0); }

  std::string WaitForEnd(std::chrono::milliseconds timeout) override { return exits_->Wait(pid_, timeout); }

 private:
  const pid_t pid_;
  const UniqueFd pidfd_;
  const std::shared_ptr<Exits> exits_;
  const DetachFunction detach_;
  std::atomic<bool> detached_{false};
};

std::shared_ptr<KeeperLoaderSpawner::Exits> KeeperLoaderSpawner::MakeExits() { return std::make_shared<Exits>(); }

void KeeperLoaderSpawner::Start(SpawnFunction spawn, DetachFunction detach) {
  MutexLock lock(mutex_);
  spawn_ = std::move(spawn);
  detach_ = std::move(detach);
}

absl::StatusOr<SpawnedLoader> KeeperLoaderSpawner::Spawn(const internal::v1::LoadRequest& request) {
  SpawnFunction spawn;
  DetachFunction detach;
  {
    MutexLock lock(mutex_);
    spawn = spawn_;
    detach = detach_;
  }
  if (!spawn) return MakeError(Reason::kServiceUnavailable, "there is no keeper yet to start a loader");
  const std::string bytes = request.SerializeAsString();
  ASSIGN_OR_RETURN(const UniqueFd request_fd,
                   CreateSealedMemfd("weightbroker-load-request", std::as_bytes(std::span(bytes))));
  ASSIGN_OR_RETURN(KeeperLoader loader, spawn({}, request_fd.get()));
  return SpawnedLoader{std::move(loader.control_socket),
                       std::make_unique<Process>(loader.pid, std::move(loader.pidfd), exits_, std::move(detach))};
}

void KeeperLoaderSpawner::OnExited(pid_t pid, int wait_status) { exits_->Set(pid, wait_status); }

}  // namespace weightbroker
