#include "server/broker/publisher_process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weightbroker {
namespace {

// Field 22 of /proc/<pid>/stat, counted from 1; the second is the program's name in parentheses and may have anything
// in it. 0 if it cannot be read.
int64_t ReadStartTicks(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  constexpr int kFieldsBetween = 19;  // the third field to the twenty-first
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < kFieldsBetween; ++i) fields >> field;
  int64_t ticks = 0;
  return fields >> ticks ? ticks : 0;
}

}  // namespace

PublisherProcess PublisherProcess::Find(pid_t pid) {
  if (pid <= 0) return PublisherProcess(0, 0, UniqueFd(), /*has_exited=*/false);
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  const bool has_exited = !pidfd.valid() && errno == ESRCH;
  return PublisherProcess(pid, ReadStartTicks(pid), std::move(pidfd), has_exited);
}

PublisherProcess PublisherProcess::Remember(pid_t pid, int64_t start_ticks) {
  PublisherProcess found = Find(pid);
  const bool is_known = start_ticks != 0 && found.start_ticks_ != 0;
  if (!is_known || found.start_ticks_ == start_ticks) return found;
  return PublisherProcess(pid, start_ticks, UniqueFd(), /*has_exited=*/true);
}

bool PublisherProcess::may_run() const {
  if (has_exited_) return false;
  if (!pidfd_.valid()) return true;
  pollfd entry{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) == 0;
}

}  // namespace weightbroker
