#include "server/keeper/loaders.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/process/loader_program.h"
#include "common/process/spawn.h"

namespace weightbroker {

absl::StatusOr<StartedLoader> Loaders::Spawn(int64_t owner, const std::vector<std::string>& arguments, int request_fd) {
  if (CountOwned() >= max_loaders_) {
    return MakeError(Reason::kKeeperRefused,
                     absl::StrCat(CountOwned(), " loaders are running, which is the most that are allowed"),
                     {{"limit", absl::StrCat(max_loaders_)}});
  }
  ASSIGN_OR_RETURN(SocketPair control, CreateSeqpacketPair());
  SpawnOptions options = LoaderProgram(path_, request_fd, control.second.get());
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  ASSIGN_OR_RETURN(ChildProcess child, weightbroker::Spawn(options));

  StartedLoader loader;
  loader.pid = child.pid();
  loader.control_socket = std::move(control.first);
  loader.pidfd = std::move(child).Release();
  owners_[loader.pid] = owner;
  return loader;
}

size_t Loaders::CountOwned() const {
  return static_cast<size_t>(
      std::count_if(owners_.begin(), owners_.end(), [](const auto& loader) { return loader.second != kNobody; }));
}

bool Loaders::Detach(int64_t owner, pid_t pid) {
  const auto it = owners_.find(pid);
  if (it == owners_.end() || it->second != owner) return false;
  it->second = kNobody;
  return true;
}

int Loaders::KillAllOf(int64_t owner) const {
  int killed = 0;
  for (const auto& [pid, loader_owner] : owners_) {
    if (loader_owner == owner && kill(pid, SIGKILL) == 0) ++killed;
  }
  return killed;
}

void Loaders::KillAll() const {
  for (const auto& [pid, owner] : owners_) kill(pid, SIGKILL);
}

std::optional<int64_t> Loaders::OnExited(pid_t pid) {
  const auto it = owners_.find(pid);
  if (it == owners_.end()) return std::nullopt;
  const int64_t owner = it->second;
  owners_.erase(it);
  return owner;
}

}  // namespace weightbroker
