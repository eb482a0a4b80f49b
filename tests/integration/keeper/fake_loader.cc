// A loader that loads nothing: says over its control socket what it was given, and then lives until the socket closes
// or, with --stubborn, until it is killed; --exit=N ends at once with that code; --orphan leaves a grandchild.
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "common/base/socket.h"

namespace {

constexpr int kRequestFd = 3;
constexpr int kControlFd = 4;

// A process whose parent ends before it does.
void LeaveAnOrphan() {
  const pid_t child = fork();
  if (child > 0) return;
  if (fork() == 0) {
    usleep(50'000);
    _exit(0);
  }
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  std::string said;
  bool stubborn = false;
  int exit_code = -1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    said += argument + " ";
    if (argument == "--stubborn") stubborn = true;
    if (argument == "--orphan") LeaveAnOrphan();
    if (argument.rfind("--exit=", 0) == 0) exit_code = std::stoi(argument.substr(7));
  }
  char request[100] = {};
  if (pread(kRequestFd, request, sizeof(request) - 1, 0) >= 0) said += request;
  struct stat file = {};
  if (fstat(5, &file) == 0) said += " LEAKED_FD";
  weightbroker::SendMessage(kControlFd, said).IgnoreError();
  if (exit_code >= 0) return exit_code;
  const auto end = weightbroker::ReceiveMessage(kControlFd);
  if (stubborn) pause();
  return 0;
}
