#include <poll.h>
#include <signal.h>

#include <span>
#include <utility>

#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"
#include "common/process/loader_program.h"
#include "common/process/spawn.h"
#include "server/broker/loader_spawner.h"

namespace weightbroker {
namespace {

class ChildLoader : public LoaderProcess {
 public:
  explicit ChildLoader(ChildProcess child) : pidfd_(child.pidfd()), child_(std::move(child)) {}

  void Kill(const std::string& cause) override {
    if (!WaitForEnd(std::chrono::milliseconds(0)).empty()) return;
    MutexLock lock(mutex_);
    LogKill(child_.pid(), cause);
    (void)child_.Kill(SIGKILL);
  }

  // A child dies with its ChildProcess, which its exporter has by then; and with this broker, since nothing outlives
  // one that has no keeper.
  absl::Status Detach() override { return absl::OkStatus(); }

  // Polls without the lock, so that Kill need not wait for it.
  std::string WaitForEnd(std::chrono::milliseconds timeout) override {
    pollfd ended = {.fd = pidfd_, .events = POLLIN, .revents = 0};
    poll(&ended, 1, static_cast<int>(timeout.count()));
    MutexLock lock(mutex_);
    const auto exit = child_.Wait(std::chrono::milliseconds(0));
    return exit.ok() ? exit->ToString() : "";
  }

 private:
  const int pidfd_;  // child_'s

  Mutex mutex_;
  ChildProcess child_ ABSL_GUARDED_BY(mutex_);
};

class ProcessLoaderSpawner : public LoaderSpawner {
 public:
  explicit ProcessLoaderSpawner(std::string path) : path_(std::move(path)) {}

  absl::StatusOr<SpawnedLoader> Spawn(const internal::v1::LoadRequest& request) override {
    const std::string bytes = request.SerializeAsString();
    ASSIGN_OR_RETURN(const UniqueFd request_fd,
                     CreateSealedMemfd("weightbroker-load-request", std::as_bytes(std::span(bytes))));
    ASSIGN_OR_RETURN(SocketPair control, CreateSeqpacketPair());
    ASSIGN_OR_RETURN(ChildProcess child,
                     weightbroker::Spawn(LoaderProgram(path_, request_fd.get(), control.second.get())));
    return SpawnedLoader{std::move(control.first), std::make_unique<ChildLoader>(std::move(child))};
  }

 private:
  const std::string path_;
};

}  // namespace

std::unique_ptr<LoaderSpawner> NewProcessLoaderSpawner(std::string loader_path) {
  return std::make_unique<ProcessLoaderSpawner>(std::move(loader_path));
}

}  // namespace weightbroker
