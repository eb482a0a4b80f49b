#include "client/src/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"

namespace weightbroker::client {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kProgramVariable[] = "WEIGHTBROKERD";
constexpr int kSocketInUseExitCode = 4;  // of weightbrokerd: another service has the socket
constexpr size_t kMaxLogTailBytes = 2048;
constexpr size_t kMaxLogTailLines = 8;

absl::StatusOr<UniqueFd> OpenLog(const std::string& path) {
  UniqueFd log(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (log.valid()) return log;
  return MakeError(Reason::kServiceNotStarted,
                   absl::StrCat("no service was started: its log ", path, " cannot be written: ", strerror(errno),
                                "; name another file, or make its folder"),
                   {{"log", path}, {"errno", strerrorname_np(errno)}});
}

// The last lines of what was written behind `offset_bytes`, separated by " | ".
std::string LastLines(const std::string& path, int64_t offset_bytes) {
  const UniqueFd log(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat file = {};
  if (!log.valid() || fstat(log.get(), &file) != 0) return "";
  const int64_t begin = std::max<int64_t>(offset_bytes, file.st_size - static_cast<int64_t>(kMaxLogTailBytes));
  std::string text(kMaxLogTailBytes, '\0');
  const ssize_t length = pread(log.get(), text.data(), text.size(), begin);
  text.resize(length > 0 ? static_cast<size_t>(length) : 0);
  std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (begin > offset_bytes && !lines.empty()) lines.erase(lines.begin());  // it has lost its beginning
  if (lines.size() > kMaxLogTailLines) lines.erase(lines.begin(), lines.end() - kMaxLogTailLines);
  return absl::StrJoin(lines, " | ");
}

bool WaitUntilSomebodyListens(const std::string& path, Clock::time_point deadline) {
  constexpr milliseconds kInterval(2);
  while (!SomebodyListens(path)) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kInterval);
  }
  return true;
}

}  // namespace

bool SomebodyListens(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return true;  // not known: to start another service would be worse than to wait for none
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return true;
  return errno != ENOENT && errno != ENOTDIR && errno != ECONNREFUSED;
}

Daemon::Daemon(DaemonSettings settings, DefaultSocket socket)
    : settings_(std::move(settings)),
      socket_(std::move(socket)),
      log_path_(settings_.log_path.empty() ? socket_.path + ".log" : settings_.log_path) {}

absl::StatusOr<Daemon::Started> Daemon::Start(milliseconds timeout) const {
  const Clock::time_point deadline = Clock::now() + timeout;
  ASSIGN_OR_RETURN(const std::string program, FindProgram());
  // As the service itself would; the log is to lie there before it runs.
  if (socket_.create_folder) mkdir(socket_.path.substr(0, socket_.path.rfind('/')).c_str(), 0755);
  ASSIGN_OR_RETURN(const UniqueFd log, OpenLog(log_path_));
  Started started;
  started.log_offset_bytes = lseek(log.get(), 0, SEEK_END);
  auto child = Spawn(
      {.path = program, .arguments = Arguments(), .fds = {{log.get(), STDOUT_FILENO}, {log.get(), STDERR_FILENO}}});
  if (!child.ok()) return NotStarted(program, std::string(child.status().message()), started.log_offset_bytes);
  const auto exit = child->Wait(timeout);  // what goes on is a grandchild
  if (!exit.ok()) return NotStarted(program, "it did not come up in time", started.log_offset_bytes);
  if (exit->success()) return started;
  // Whoever has the lock listens in a moment, or ends and leaves it to nobody.
  if (exit->code == kSocketInUseExitCode && WaitUntilSomebodyListens(socket_.path, deadline)) return started;
  return NotStarted(program, exit->ToString(), started.log_offset_bytes);
}

absl::Status Daemon::Ended(const Started& started) const {
  const auto program = FindProgram();
  return NotStarted(program.ok() ? *program : settings_.program, "it ended soon after its start",
                    started.log_offset_bytes);
}

absl::StatusOr<std::string> Daemon::FindProgram() const {
  if (!settings_.program.empty()) return settings_.program;
  const char* named = getenv(kProgramVariable);
  if (named != nullptr && *named != '\0') return std::string(named);
  return PathBesideThisProgram("weightbrokerd");
}

std::vector<std::string> Daemon::Arguments() const {
  std::vector<std::string> arguments = {"--detach"};
  // It finds its default place by itself, and may make a folder only there.
  if (!socket_.create_folder) arguments.push_back("--socket=" + socket_.path);
  arguments.insert(arguments.end(), settings_.flags.begin(), settings_.flags.end());
  return arguments;
}

absl::Status Daemon::NotStarted(const std::string& program, const std::string& how, int64_t log_offset_bytes) const {
  const std::string lines = LastLines(log_path_, log_offset_bytes);
  return MakeError(Reason::kServiceNotStarted,
                   absl::StrCat("no service answers at ", socket_.path, ", and ", program, " did not start one: ", how,
                                lines.empty() ? absl::StrCat("; its path can be given, or set in ", kProgramVariable)
                                              : absl::StrCat("; its log ", log_path_, " ends with: ", lines)),
                   {{"socket", socket_.path}, {"program", program}, {"how", how}, {"log", log_path_}});
}

}  // namespace weightbroker::client
