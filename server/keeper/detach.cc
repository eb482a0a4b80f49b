#include "server/keeper/detach.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr int kLostExitCode = 1;

[[noreturn]] void WaitForReport(int pipe) {
  unsigned char exit_code = kLostExitCode;
  while (read(pipe, &exit_code, 1) < 0 && errno == EINTR) {
  }
  _exit(exit_code);
}

void LeaveTerminal() {
  setsid();
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (null.valid()) dup2(null.get(), STDIN_FILENO);
}

// A rank of an engine is often pinned to a few processors and a memory node; what it starts serves all ranks.
void Unpin() {
  cpu_set_t all;
  memset(&all, 0xff, sizeof(all));
  sched_setaffinity(0, sizeof(all), &all);  // the kernel leaves out what the cpuset forbids
  constexpr int kDefaultPolicy = 0;
  syscall(SYS_set_mempolicy, kDefaultPolicy, nullptr, 0);
}

void ForgetServiceManager() {
  for (const char* variable :
       {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) {
    unsetenv(variable);
  }
}

}  // namespace

absl::StatusOr<Detached> Detached::Enter() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return SystemError("cannot detach: no pipe", errno);
  UniqueFd command(ends[0]);
  UniqueFd report(ends[1]);
  const pid_t pid = fork();
  if (pid < 0) return SystemError("cannot detach: no process", errno);
  if (pid > 0) {
    report.reset();
    WaitForReport(command.get());
  }
  LeaveTerminal();
  Unpin();
  ForgetServiceManager();
  return Detached(std::move(report));
}

void Detached::Report(int exit_code) && {
  const auto byte = static_cast<unsigned char>(exit_code);
  while (write(command_.get(), &byte, 1) < 0 && errno == EINTR) {
  }
  command_.reset();
}

}  // namespace weightbroker
