// Has the keeper start the loaders, which reaps them and ends them when this broker ends.
//
//   ASSIGN_OR_RETURN(auto client, KeeperClient::FromFd(std::move(fd), options));
//   KeeperLoaderSpawner spawner([&](const auto& arguments, int fd) { return client->SpawnLoader(arguments, fd); },
//                               [&](pid_t pid) { return client->DetachLoader(pid); });
//
// Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/keeper/client.h"
#include "server/broker/loader_spawner.h"

namespace weightbroker {

class KeeperLoaderSpawner : public LoaderSpawner {
 public:
  // As KeeperClient::SpawnLoader.
  using SpawnFunction = std::function<absl::StatusOr<KeeperLoader>(const std::vector<std::string>&, int request_fd)>;

  // As KeeperClient::DetachLoader.
  using DetachFunction = std::function<absl::Status(pid_t pid)>;

  // Without `detach` no loader can be detached.
  explicit KeeperLoaderSpawner(SpawnFunction spawn, DetachFunction detach = {})
      : spawn_(std::move(spawn)), detach_(std::move(detach)) {}

  // Fails as the spawn function does.
  absl::StatusOr<SpawnedLoader> Spawn(const internal::v1::LoadRequest& request) override;

 private:
  const SpawnFunction spawn_;
  const DetachFunction detach_;
};

}  // namespace weightbroker
