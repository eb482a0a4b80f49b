#include "common/base/socket.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr size_t kMaxMessageBytes = 64 * 1024;
constexpr size_t kControlBytes = CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage);

absl::Status PeerGone(const std::string& what) {
  return MakeError(Reason::kServiceUnavailable, absl::StrCat(what, ": the other process has closed the socket"));
}

absl::Status CheckSendable(std::string_view bytes, std::span<const int> fds) {
  // An empty packet cannot be told from the end of the connection.
  if (bytes.empty() || bytes.size() > kMaxMessageBytes) {
    return MakeError(
        Reason::kInvalidArgument,
        absl::StrCat("a message of ", bytes.size(), " bytes cannot be sent: 1 to ", kMaxMessageBytes, " can"),
        {{"bytes", absl::StrCat(bytes.size())}, {"limit", absl::StrCat(kMaxMessageBytes)}});
  }
  if (fds.size() > static_cast<size_t>(kMaxFdsPerMessage)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("a message with ", fds.size(), " file descriptors cannot be sent: at most ",
                                  kMaxFdsPerMessage, " can"),
                     {{"fds", absl::StrCat(fds.size())}, {"limit", absl::StrCat(kMaxFdsPerMessage)}});
  }
  return absl::OkStatus();
}

// Waits until `socket` has one of `events`. DEADLINE_EXCEEDED at `deadline`.
absl::Status WaitFor(int socket, short events, std::optional<std::chrono::steady_clock::time_point> deadline) {
  while (true) {
    int wait_ms = -1;
    if (deadline.has_value()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - std::chrono::steady_clock::now());
      wait_ms = static_cast<int>(std::max<int64_t>(0, left.count()));
    }
    pollfd entry{.fd = socket, .events = events, .revents = 0};
    const int ready = poll(&entry, 1, wait_ms);
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return MakeError(Reason::kDeadlineExceeded, "the other process sent nothing in time");
    if (errno != EINTR) return SystemError("poll", errno);
  }
}

// sendmsg; 0 or an errno.
int SendOnce(int socket, std::string_view bytes, std::span<const int> fds, int flags) {
  iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control_buffer[kControlBytes] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control_buffer;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(control), fds.data(), fds.size_bytes());
  }
  while (sendmsg(socket, &header, MSG_NOSIGNAL | flags) < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::vector<UniqueFd> TakeFds(msghdr& header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr; control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

absl::StatusOr<SocketPair> CreateSeqpacketPair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return SystemError("socketpair", errno);
  return SocketPair{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

absl::Status SendMessage(int socket, std::string_view bytes, std::span<const int> fds) {
  RETURN_IF_ERROR(CheckSendable(bytes, fds));
  while (const int error = SendOnce(socket, bytes, fds, 0)) {
    if (error == EPIPE || error == ECONNRESET) return PeerGone("send");
    if (error == ETOOMANYREFS) {
      return SystemError("sendmsg: too many descriptors of this user are in flight; raise RLIMIT_NOFILE", ETOOMANYREFS);
    }
    if (error != EAGAIN) return SystemError("sendmsg", error);
    RETURN_IF_ERROR(WaitFor(socket, POLLOUT, std::nullopt));  // a non-blocking socket
  }
  return absl::OkStatus();
}

int SendNow(int socket, std::string_view bytes, std::span<const int> fds) {
  return SendOnce(socket, bytes, fds, MSG_DONTWAIT);
}

absl::StatusOr<SocketMessage> ReceiveMessage(int socket, std::optional<std::chrono::milliseconds> timeout) {
  std::optional<std::chrono::steady_clock::time_point> deadline;
  if (timeout.has_value()) deadline = std::chrono::steady_clock::now() + *timeout;

  SocketMessage message;
  message.bytes.resize(kMaxMessageBytes);
  iovec part{.iov_base = message.bytes.data(), .iov_len = message.bytes.size()};
  alignas(cmsghdr) char control_buffer[kControlBytes];
  msghdr header{};
  ssize_t received = -1;
  while (received < 0) {
    RETURN_IF_ERROR(WaitFor(socket, POLLIN, deadline));
    header = msghdr{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control_buffer;
    header.msg_controllen = sizeof(control_buffer);
    received = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received >= 0) break;
    if (errno == ECONNRESET) return SocketMessage{.closed = true, .bytes = {}, .fds = {}};
    if (errno != EINTR && errno != EAGAIN) return SystemError("recvmsg", errno);
  }
  message.fds = TakeFds(header);  // owned from here on, also where the message is refused
  if (received == 0) return SocketMessage{.closed = true, .bytes = {}, .fds = {}};
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("a message of more than ", kMaxMessageBytes, " bytes arrived"),
                     {{"limit", absl::StrCat(kMaxMessageBytes)}});
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("file descriptors were lost on their way: ", message.fds.size(),
                                  " arrived; this process may be at its RLIMIT_NOFILE, raise it"),
                     {{"fds_received", absl::StrCat(message.fds.size())}});
  }
  message.bytes.resize(static_cast<size_t>(received));
  return message;
}

int64_t RaiseFdLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<int64_t>(limit.rlim_cur);
}

absl::StatusOr<int64_t> RaiseFdLimitTo(int64_t least) {
  const int64_t limit = RaiseFdLimit();
  if (limit >= least) return limit;
  return SystemError(
      absl::StrCat("this process may have ", limit, " open files (RLIMIT_NOFILE, hard) and needs at least ", least,
                   ": raise it with LimitNOFILE= of the unit or `ulimit -Hn`"),
      EMFILE);
}

}  // namespace weightbroker
