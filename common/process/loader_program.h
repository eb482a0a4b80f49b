// How a loader is started, whoever does it: which descriptors it gets, and the flags that tell it their numbers.
//
//   ASSIGN_OR_RETURN(ChildProcess child, Spawn(LoaderProgram(path, request_fd, control_fd)));
//
// A pure function.
#pragma once

#include <string>

#include "common/process/spawn.h"

namespace weightbroker {

// `request_fd` is a sealed memfd with its LoadRequest, `control_fd` its end of the control socket.
inline SpawnOptions LoaderProgram(const std::string& path, int request_fd, int control_fd) {
  constexpr int kRequestFd = 3;
  constexpr int kControlFd = 4;
  return {.path = path,
          .arguments = {"--request_fd=" + std::to_string(kRequestFd), "--control_fd=" + std::to_string(kControlFd)},
          .fds = {{request_fd, kRequestFd}, {control_fd, kControlFd}}};
}

}  // namespace weightbroker
