#include "server/broker/keeper_loader_spawner.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <span>
#include <utility>

#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"
#include "common/process/spawn.h"

namespace weightbroker {
namespace {

class KeptLoader : public LoaderProcess {
 public:
  KeptLoader(UniqueFd pidfd, std::shared_ptr<LoaderEnd> end) : pidfd_(std::move(pidfd)), end_(std::move(end)) {}
  ~KeptLoader() override { KillIt(); }

  // Where the loader is in a PID namespace that this process may not signal into, the closed control socket ends it.
  void Kill() override { KillIt(); }

  std::string WaitForEnd(std::chrono::milliseconds timeout) override {
    const std::optional<int> wait_status = end_->Wait(timeout);
    return wait_status.has_value() ? ExitStatus::FromWaitStatus(*wait_status).ToString() : "";
  }

 private:
  void KillIt() { syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0); }

  const UniqueFd pidfd_;
  const std::shared_ptr<LoaderEnd> end_;
};

}  // namespace

absl::StatusOr<SpawnedLoader> KeeperLoaderSpawner::Spawn(const internal::v1::LoadRequest& request) {
  const std::string bytes = request.SerializeAsString();
  ASSIGN_OR_RETURN(const UniqueFd request_fd,
                   CreateSealedMemfd("weightbroker-load-request", std::as_bytes(std::span(bytes))));
  ASSIGN_OR_RETURN(KeeperLoader loader, spawn_({}, request_fd.get()));
  return SpawnedLoader{std::move(loader.control_socket),
                       std::make_unique<KeptLoader>(std::move(loader.pidfd), std::move(loader.end))};
}

}  // namespace weightbroker
