#include "server/keeper/service_manager.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/log.h"

namespace weightbroker {
namespace {

// A service manager that is busy is waited for, because a descriptor that it has not got would be lost with this
// process; one that hangs must not make the keeper hang.
constexpr timeval kSendTimeout = {.tv_sec = 1, .tv_usec = 0};

constexpr int kFirstInheritedFd = 3;  // SD_LISTEN_FDS_START

// The variable's value, which is removed; an empty string if it is not set.
std::string TakeVariable(const char* name) {
  const char* value = getenv(name);
  std::string taken = value == nullptr ? "" : value;
  unsetenv(name);
  return taken;
}

int64_t NumberOr(const std::string& text, int64_t otherwise) {
  int64_t number = 0;
  return absl::SimpleAtoi(text, &number) ? number : otherwise;
}

}  // namespace

ServiceManager ServiceManager::FromEnvironment() {
  std::string notify_socket = TakeVariable("NOTIFY_SOCKET");
  const int64_t watchdog_us = NumberOr(TakeVariable("WATCHDOG_USEC"), 0);
  const bool watchdog_is_ours = NumberOr(TakeVariable("WATCHDOG_PID"), getpid()) == getpid();
  // Half of what is allowed, as systemd advises.
  return ServiceManager(std::move(notify_socket), std::chrono::microseconds(watchdog_is_ours ? watchdog_us / 2 : 0));
}

ServiceManager::ServiceManager(std::string notify_socket, std::chrono::microseconds watchdog_interval)
    : notify_socket_(std::move(notify_socket)), watchdog_interval_(watchdog_interval) {}

std::vector<NamedFd> ServiceManager::TakeInheritedFds() {
  const bool for_us = NumberOr(TakeVariable("LISTEN_PID"), -1) == getpid();
  const int64_t count = NumberOr(TakeVariable("LISTEN_FDS"), 0);
  const std::vector<std::string> names = absl::StrSplit(TakeVariable("LISTEN_FDNAMES"), ':');
  std::vector<NamedFd> inherited;
  if (!for_us) return inherited;
  for (int64_t i = 0; i < count; ++i) {
    const int fd = kFirstInheritedFd + static_cast<int>(i);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) continue;
    const auto index = static_cast<size_t>(i);
    inherited.push_back({index < names.size() ? names[index] : "", UniqueFd(fd)});
  }
  return inherited;
}

void ServiceManager::StoreFd(const std::string& name, int fd) const {
  // FDPOLL=0: a socket that reports an error is still ours to close.
  SendNotification(absl::StrCat("FDSTORE=1\nFDNAME=", name, "\nFDPOLL=0"), fd);
}

void ServiceManager::RemoveFd(const std::string& name) const {
  SendNotification(absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name), -1);
}

void ServiceManager::SendNotification(std::string_view text, int fd) const {
  if (!present()) return;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const size_t length = std::min(notify_socket_.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, notify_socket_.data(), length);
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';

  iovec data = {.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()};
  alignas(cmsghdr) char control_buffer[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
  header.msg_name = &address;
  header.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control_buffer;
    header.msg_controllen = sizeof(control_buffer);
    cmsghdr* control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &fd, sizeof(int));
  }
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &kSendTimeout, sizeof(kSendTimeout));
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    Log(LogLevel::kWarning, "service_manager.notify_failed",
        {{"message", std::string(text)}, {"errno", strerrorname_np(errno)}});
  }
}

}  // namespace weightbroker
