// Has the keeper start the loaders, which reaps them and ends them when this broker ends.
//
//   KeeperLoaderSpawner spawner;
//   options.on_exited = [&](pid_t pid, int wait_status) { spawner.OnExited(pid, wait_status); };
//   ASSIGN_OR_RETURN(auto client, KeeperClient::FromFd(std::move(fd), options));
//   spawner.Start([&](const auto& arguments, int fd) { return client->SpawnLoader(arguments, fd); },
//                 [&](pid_t pid) { return client->DetachLoader(pid); });
//
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/keeper/client.h"
#include "server/broker/loader_spawner.h"

namespace weightbroker {

class KeeperLoaderSpawner : public LoaderSpawner {
 public:
  // As KeeperClient::SpawnLoader.
  using SpawnFunction = std::function<absl::StatusOr<KeeperLoader>(const std::vector<std::string>&, int request_fd)>;

  // As KeeperClient::DetachLoader.
  using DetachFunction = std::function<absl::Status(pid_t pid)>;

  // Loaders can be spawned from here on; without `detach` none of them can be detached.
  void Start(SpawnFunction spawn, DetachFunction detach = {});

  // Fails as the spawn function does.
  absl::StatusOr<SpawnedLoader> Spawn(const internal::v1::LoadRequest& request) override;

  // A loader has ended, with its status as waitpid gives it. May come before Spawn has learnt its number.
  void OnExited(pid_t pid, int wait_status);

 private:
  class Process;
  class Exits;

  const std::shared_ptr<Exits> exits_ = MakeExits();
  static std::shared_ptr<Exits> MakeExits();

  Mutex mutex_;
  SpawnFunction spawn_ ABSL_GUARDED_BY(mutex_);
  DetachFunction detach_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker
