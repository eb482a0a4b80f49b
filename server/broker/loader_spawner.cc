#include "server/broker/loader_spawner.h"

#include "absl/strings/str_cat.h"
#include "common/base/log.h"

namespace weightbroker {

void LoaderProcess::LogKill(pid_t pid, const std::string& cause) {
  Log(LogLevel::kInfo, "loader.killed", {{"loader_pid", absl::StrCat(pid)}, {"cause", cause}});
}

void EndLoader(LoaderProcess& loader, bool has_said_so, const std::string& cause, std::chrono::milliseconds grace) {
  if (has_said_so && !loader.WaitForEnd(grace).empty()) return;
  loader.Kill(cause);
  loader.WaitForEnd(grace);
}

}  // namespace weightbroker
