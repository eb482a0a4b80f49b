#include "server/broker/keeper_loader_spawner.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <span>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"
#include "common/process/spawn.h"

namespace weightbroker {
namespace {

class KeptLoader : public LoaderProcess {
 public:
  KeptLoader(KeeperLoader loader, KeeperLoaderSpawner::DetachFunction detach)
      : pid_(loader.pid), pidfd_(std::move(loader.pidfd)), end_(std::move(loader.end)), detach_(std::move(detach)) {}
  ~KeptLoader() override {
    if (!detached_) SendKill();
  }

  absl::Status Detach() override {
    if (!detach_) return MakeError(Reason::kKeeperRefused, "the keeper cannot detach a loader");
    RETURN_IF_ERROR(detach_(pid_));
    detached_ = true;
    return absl::OkStatus();
  }

  // Where the loader is in a PID namespace that this process may not signal into, the closed control socket ends it.
  void Kill(const std::string& cause) override {
    if (HasEnded(std::chrono::milliseconds(0))) return;
    LogKill(pid_, cause);
    SendKill();
  }

  std::string WaitForEnd(std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    if (const std::optional<int> wait_status = end_->Wait(timeout); wait_status.has_value()) {
      return ExitStatus::FromWaitStatus(*wait_status).ToString();
    }
    // Where the keeper has gone, that the loader has ended can be seen, and not how.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    HasEnded(left);
    return "";
  }

 private:
  // Seen without the keeper.
  bool HasEnded(std::chrono::milliseconds timeout) const {
    pollfd ended = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    return poll(&ended, 1, static_cast<int>(std::max<int64_t>(0, timeout.count()))) > 0;
  }

  void SendKill() { syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0); }

  const pid_t pid_;
  const UniqueFd pidfd_;
  const std::shared_ptr<LoaderEnd> end_;
  const KeeperLoaderSpawner::DetachFunction detach_;
  std::atomic<bool> detached_{false};
};

}  // namespace

absl::StatusOr<SpawnedLoader> KeeperLoaderSpawner::Spawn(const internal::v1::LoadRequest& request) {
  const std::string bytes = request.SerializeAsString();
  ASSIGN_OR_RETURN(const UniqueFd request_fd,
                   CreateSealedMemfd("weightbroker-load-request", std::as_bytes(std::span(bytes))));
  ASSIGN_OR_RETURN(KeeperLoader loader, spawn_({}, request_fd.get()));
  UniqueFd control_socket = std::move(loader.control_socket);
  return SpawnedLoader{std::move(control_socket), std::make_unique<KeptLoader>(std::move(loader), detach_)};
}

}  // namespace weightbroker
