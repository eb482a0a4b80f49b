#include "common/base/thread.h"

#include <unistd.h>

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"

namespace weightbroker {

absl::StatusOr<std::thread> StartThread(const std::string& what, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return SystemError(
        absl::StrCat("cannot start a thread for ", what,
                     ": is a limit of processes (pids.max of the cgroup, RLIMIT_NPROC) or memory used up?"),
        error.code().value());
  }
}

std::thread StartThreadOrExit(const std::string& what, std::function<void()> body) {
  auto thread = StartThread(what, std::move(body));
  if (thread.ok()) return *std::move(thread);
  Log(LogLevel::kError, "thread.not_started", {{"message", std::string(thread.status().message())}});
  _exit(1);
}

void ExitUnlessEndedWithin(std::chrono::milliseconds limit, const std::string& event) {
  auto watch = StartThread("the end of the process", [limit, event] {
    std::this_thread::sleep_for(limit);
    Log(LogLevel::kError, event, {{"after_ms", absl::StrCat(limit.count())}});
    _exit(1);
  });
  if (watch.ok()) watch->detach();
}

}  // namespace weightbroker
