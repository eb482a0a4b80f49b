// The other side of the endpoint, without gRPC: raw connections, and child processes that connect as somebody else.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <string_view>

#include "common/base/unique_fd.h"

namespace weightbroker::testing {

// A blocking connection, invalid (with errno) if nothing answers.
inline UniqueFd Connect(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fd.reset();
  return fd;
}

inline void Send(const UniqueFd& fd, std::string_view bytes) {
  ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// Whether the other side closes within `timeout_ms`; what it sends before is thrown away.
inline bool IsClosedWithin(const UniqueFd& fd, int timeout_ms) {
  char buffer[4096];
  while (true) {
    pollfd ready = {.fd = fd.get(), .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, timeout_ms) <= 0) return false;
    if (recv(fd.get(), buffer, sizeof(buffer), MSG_DONTWAIT) <= 0) return true;
  }
}

// Runs `body` in a forked child as user and group `uid`, and gives its exit code (-1 if a signal ended it). `body` must
// take no lock that a thread of the test may hold.
inline int RunAsUser(uid_t uid, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (uid != geteuid() && (setgid(uid) != 0 || setuid(uid) != 0)) _exit(125);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline constexpr uid_t kNobody = 65534;

}  // namespace weightbroker::testing
