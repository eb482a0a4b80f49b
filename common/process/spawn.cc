#include "common/process/spawn.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr int kMaxChildFd = 999;

// By number, because <sys/pidfd.h> of glibc 2.36 declares them for C only.
int OpenPidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
int SendSignal(int pidfd, int signal) {
  return static_cast<int>(syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0));
}

class FileActions {
 public:
  FileActions() { posix_spawn_file_actions_init(&actions_); }
  ~FileActions() { posix_spawn_file_actions_destroy(&actions_); }
  FileActions(const FileActions&) = delete;
  FileActions& operator=(const FileActions&) = delete;

  // These fail only for want of memory, in which case posix_spawn would not work either.
  void OpenDevNull(int fd) { posix_spawn_file_actions_addopen(&actions_, fd, "/dev/null", O_RDONLY, 0); }
  void Duplicate(int from, int to) { posix_spawn_file_actions_adddup2(&actions_, from, to); }
  void Close(int fd) { posix_spawn_file_actions_addclose(&actions_, fd); }
  void CloseFrom(int fd) { posix_spawn_file_actions_addclosefrom_np(&actions_, fd); }
  const posix_spawn_file_actions_t* get() const { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

class Attributes {
 public:
  // Every signal unblocked and at its default, in a process group of its own.
  Attributes() {
    posix_spawnattr_init(&attributes_);
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~Attributes() { posix_spawnattr_destroy(&attributes_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
  const posix_spawnattr_t* get() const { return &attributes_; }

 private:
  posix_spawnattr_t attributes_;
};

absl::Status CheckMappings(const SpawnOptions& options) {
  std::set<int> seen;
  for (const FdMapping& mapping : options.fds) {
    if (mapping.child_fd < 0 || mapping.child_fd > kMaxChildFd || !seen.insert(mapping.child_fd).second) {
      return MakeError(Reason::kInvalidArgument,
                       absl::StrCat(options.path, ": descriptor ", mapping.child_fd,
                                    " of the child is mapped twice, or not between 0 and ", kMaxChildFd),
                       {{"program", options.path}, {"child_fd", absl::StrCat(mapping.child_fd)}});
    }
  }
  return absl::OkStatus();
}

absl::Status CannotPass(const SpawnOptions& options, int fd, int lowest, int error_number) {
  std::string what = absl::StrCat("cannot pass descriptor ", fd, " to ", options.path);
  if (error_number == EMFILE || error_number == EINVAL) {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    absl::StrAppend(&what, ": a number from ", lowest, " on is needed and the limit of open files, RLIMIT_NOFILE, is ",
                    limit.rlim_cur, ": raise it");
  }
  return SystemError(what, error_number);
}

// Copies of the descriptors to map, numbered above every child number, so that one mapping cannot overwrite the source
// of the next.
absl::StatusOr<std::vector<UniqueFd>> CopyAboveChildNumbers(const SpawnOptions& options) {
  int lowest = 0;
  for (const FdMapping& mapping : options.fds) lowest = std::max(lowest, mapping.child_fd + 1);
  std::vector<UniqueFd> copies;
  for (const FdMapping& mapping : options.fds) {
    copies.emplace_back(fcntl(mapping.parent_fd, F_DUPFD_CLOEXEC, lowest));
    if (!copies.back().valid()) return CannotPass(options, mapping.parent_fd, lowest, errno);
  }
  return copies;
}

void PlanDescriptors(const SpawnOptions& options, const std::vector<UniqueFd>& copies, FileActions* actions) {
  std::set<int> wanted = {STDOUT_FILENO, STDERR_FILENO};
  actions->OpenDevNull(STDIN_FILENO);
  wanted.insert(STDIN_FILENO);
  for (size_t i = 0; i < copies.size(); ++i) {
    actions->Duplicate(copies[i].get(), options.fds[i].child_fd);
    wanted.insert(options.fds[i].child_fd);
  }
  const int last = *wanted.rbegin();
  for (int fd = 0; fd < last; ++fd) {
    if (wanted.count(fd) == 0) actions->Close(fd);
  }
  actions->CloseFrom(last + 1);
}

std::vector<char*> ArgumentPointers(const SpawnOptions& options) {
  std::vector<char*> pointers;
  pointers.push_back(const_cast<char*>(options.path.c_str()));
  for (const std::string& argument : options.arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// Reaps `pid`, which has ended or is about to.
ExitStatus Reap(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return ExitStatus::FromWaitStatus(status);
}

}  // namespace

ExitStatus ExitStatus::FromWaitStatus(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {.code = std::nullopt, .signal = WTERMSIG(wait_status)};
  return {.code = WEXITSTATUS(wait_status), .signal = std::nullopt};
}

int ExitStatus::shell_code() const { return signal.has_value() ? 128 + *signal : code.value_or(0); }

std::string ExitStatus::ToString() const {
  if (!signal.has_value()) return absl::StrCat("exit code ", code.value_or(0));
  const char* name = sigabbrev_np(*signal);
  return name != nullptr ? absl::StrCat("killed by SIG", name) : absl::StrCat("killed by signal ", *signal);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)), exit_(other.exit_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this != &other) {
    KillAndReap();
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::move(other.pidfd_);
    exit_ = other.exit_;
  }
  return *this;
}

ChildProcess::~ChildProcess() { KillAndReap(); }

void ChildProcess::KillAndReap() {
  if (pid_ < 0 || exit_.has_value()) return;
  SendSignal(pidfd_.get(), SIGKILL);
  exit_ = Reap(pid_);
}

UniqueFd ChildProcess::Release() && {
  pid_ = -1;
  return std::move(pidfd_);
}

absl::Status ChildProcess::Kill(int signal) {
  if (exit_.has_value()) return absl::OkStatus();
  if (SendSignal(pidfd_.get(), signal) != 0 && errno != ESRCH) {
    return SystemError(absl::StrCat("cannot send signal ", signal, " to process ", pid_), errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<ExitStatus> ChildProcess::Wait(std::optional<std::chrono::milliseconds> timeout) {
  if (exit_.has_value()) return *exit_;
  const auto deadline = std::chrono::steady_clock::now() + timeout.value_or(std::chrono::milliseconds(0));
  pollfd ended = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  while (true) {
    int wait_ms = -1;
    if (timeout.has_value()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      wait_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
    }
    const int ready = poll(&ended, 1, wait_ms);
    if (ready > 0) break;
    if (ready < 0 && errno != EINTR) return SystemError(absl::StrCat("cannot wait for process ", pid_), errno);
    if (ready == 0) {
      return MakeError(Reason::kDeadlineExceeded,
                       absl::StrCat("process ", pid_, " is still running after ", timeout->count(), " ms"),
                       {{"pid", absl::StrCat(pid_)}, {"timeout_ms", absl::StrCat(timeout->count())}});
    }
  }
  exit_ = Reap(pid_);
  return *exit_;
}

absl::StatusOr<ChildProcess> Spawn(const SpawnOptions& options) {
  RETURN_IF_ERROR(CheckMappings(options));
  ASSIGN_OR_RETURN(const std::vector<UniqueFd> copies, CopyAboveChildNumbers(options));
  FileActions actions;
  PlanDescriptors(options, copies, &actions);
  const Attributes attributes;
  const std::vector<char*> arguments = ArgumentPointers(options);

  pid_t pid = -1;
  const int error = posix_spawn(&pid, options.path.c_str(), actions.get(), attributes.get(), arguments.data(), environ);
  if (error != 0) return SystemError(absl::StrCat("cannot start ", options.path), error);

  UniqueFd pidfd(OpenPidfd(pid));
  if (!pidfd.valid()) {
    const int open_error = errno;
    kill(pid, SIGKILL);  // not reaped yet, so the number is still its own
    Reap(pid);
    return SystemError(absl::StrCat("cannot watch ", options.path), open_error);
  }
  return ChildProcess(pid, std::move(pidfd));
}

absl::StatusOr<std::string> PathBesideThisProgram(const std::string& program) {
  char self[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self));
  if (length < 0) return SystemError("cannot read /proc/self/exe", errno);
  const std::string path(self, static_cast<size_t>(length));
  return path.substr(0, path.rfind('/') + 1) + program;
}

}  // namespace weightbroker
