// Puts this process where containers put engines: into namespaces of its own and under another user. For tests that run
// as root, before there are threads.
#pragma once

#include <string>
#include <vector>

namespace weightbroker::testing {

struct Isolation {
  std::vector<std::string> namespaces;  // of "pid", "ipc", "net", "mnt"
  int uid = -1;                         // -1: stays
  int gid = -1;                         // the only group; -1: stays
  // With "mnt": where the socket is to be found from then on. Of all that the service has, the process sees it alone:
  // `hidden_folder` is empty for it.
  std::string socket_path;
  std::string hidden_folder;
};

// Returns in the isolated process, with the socket's path there. The process that called it stays behind with the exit
// code of that one, to which it passes SIGUSR1 and SIGTERM on, and which ends with it. Ends the program, saying why, if
// the system refuses.
std::string Isolate(const Isolation& isolation);

}  // namespace weightbroker::testing
