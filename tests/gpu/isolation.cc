#include "tests/gpu/isolation.h"

#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace weightbroker::testing {
namespace {

constexpr char kSharedFolder[] = "/mnt";

void Require(bool done, const char* what) {
  if (done) return;
  fprintf(stderr, "isolation: %s: %s\n", what, strerror(errno));
  exit(5);
}

int FlagsOf(const std::vector<std::string>& namespaces) {
  static const std::map<std::string, int> kFlags = {
      {"pid", CLONE_NEWPID}, {"ipc", CLONE_NEWIPC}, {"net", CLONE_NEWNET}, {"mnt", CLONE_NEWNS}};
  int flags = 0;
  for (const std::string& name : namespaces) flags |= kFlags.at(name);
  return flags;
}

// What stays behind while the isolated process runs.
[[noreturn]] void StandFor(pid_t child) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGUSR1, SIGTERM, SIGCHLD}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  while (true) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
      raise(WTERMSIG(status));
      _exit(128 + WTERMSIG(status));
    }
    int signal = 0;
    sigwait(&signals, &signal);
    if (signal != SIGCHLD) kill(child, signal);
  }
}

// A new PID namespace begins with the next child, and /proc must be its own for the driver to find itself.
void EnterNewProcess(bool own_pids) {
  const pid_t child = fork();
  Require(child >= 0, "fork");
  if (child > 0) StandFor(child);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (own_pids) Require(mount("proc", "/proc", "proc", 0, nullptr) == 0, "mounting /proc");
}

std::string ShareTheSocketAlone(const Isolation& isolation) {
  mkdir(kSharedFolder, 0755);
  const std::string shared = std::string(kSharedFolder) + "/weightbroker.sock";
  Require(mount("tmpfs", kSharedFolder, "tmpfs", 0, "mode=0755") == 0, "mounting a tmpfs");
  const int file = open(shared.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
  Require(file >= 0, "making a place for the socket");
  close(file);
  Require(mount(isolation.socket_path.c_str(), shared.c_str(), nullptr, MS_BIND, nullptr) == 0, "sharing the socket");
  Require(mount("tmpfs", isolation.hidden_folder.c_str(), "tmpfs", 0, nullptr) == 0, "hiding the service's folder");
  return shared;
}

void BecomeUser(int uid, int gid) {
  const auto group = static_cast<gid_t>(gid);
  if (gid >= 0) Require(setgroups(1, &group) == 0 && setresgid(group, group, group) == 0, "changing the group");
  const auto user = static_cast<uid_t>(uid);
  if (uid >= 0) Require(setresuid(user, user, user) == 0, "changing the user");
  // Changing the user clears it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
}

}  // namespace

std::string Isolate(const Isolation& isolation) {
  const int flags = FlagsOf(isolation.namespaces);
  std::string socket = isolation.socket_path;
  if (flags != 0) {
    const bool own_pids = (flags & CLONE_NEWPID) != 0;
    // A mount of /proc must not be seen outside.
    Require(unshare(flags | (own_pids ? CLONE_NEWNS : 0)) == 0, "unshare");
    if (own_pids || (flags & CLONE_NEWNS) != 0) {
      Require(mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "making mounts private");
    }
    EnterNewProcess(own_pids);
    if ((flags & CLONE_NEWNS) != 0) socket = ShareTheSocketAlone(isolation);
  }
  BecomeUser(isolation.uid, isolation.gid);
  return socket;
}

}  // namespace weightbroker::testing
