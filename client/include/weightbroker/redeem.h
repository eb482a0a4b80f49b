// Exchanges a ticket for file descriptors. This header needs C++17 and Linux's libc, nothing else of weightbroker, and
// throws nothing: an engine that uses the bare generated stub copies or includes it and is done.
//
//   int fds[64];
//   size_t fd_count = 0;
//   char error[weightbroker::kRedeemErrorBytes];
//   int code = weightbroker::RedeemTicket("/run/weightbroker/weightbroker.sock", header.ticket().data(),
//                                         header.ticket().size(), fds, 64, &fd_count, /*timeout_ms=*/2000, error,
//                                         sizeof(error));
//   if (code != 0) { fprintf(stderr, "%s\n", error); return code; }
//   // fds[i] is slab i of the export's header: mmap(nullptr, size, PROT_READ, MAP_SHARED, fds[i], 0), then
//   close(fds[i]).
//
// Export (see weight_broker_service.proto) gives a ticket of 32 bytes because gRPC cannot carry a descriptor. A ticket
// works once, for the user who got it, for a short time, and only while the Export stream is open. It is a capability:
// do not log it. What has been received outlives stream and service; closing it is the receiver's business.
//
// Thread-safe: no state. It may be called in a process that runs gRPC or CUDA.
//
// The protocol, for other languages. Connect a SOCK_STREAM Unix socket to the path that gRPC uses; integers are
// little-endian and unsigned:
//   request  8 bytes   magic 89 57 42 46 44 0D 0A 1A (it cannot begin an HTTP/2 connection, which begins with "PRI *")
//            4 bytes   version: 1
//            4 bytes   size of the ticket, at most 64
//            n bytes   the ticket
//   reply    8 bytes   the same magic
//            4 bytes   version: 1
//            4 bytes   status: 0 the descriptors follow; 1 ticket refused; 2 access denied; 3 request not understood
//            4 bytes   number of descriptors, 0 unless the status is 0
//            4 bytes   size of the message, at most 1024
//            n bytes   the message: for people, UTF-8, empty if the status is 0
//   then, while descriptors are left: one byte 46, carrying by SCM_RIGHTS the next 253 of them or all that are left
// The order of the descriptors is that of the slabs. The service closes the connection after the last one. A receiver
// must look at MSG_CTRUNC and count: descriptors above its RLIMIT_NOFILE vanish with nothing else to tell.
#ifndef WEIGHTBROKER_REDEEM_H_
#define WEIGHTBROKER_REDEEM_H_

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

namespace weightbroker {

namespace ticket_protocol {

constexpr size_t kMagicBytes = 8;
constexpr unsigned char kMagic[kMagicBytes] = {0x89, 'W', 'B', 'F', 'D', '\r', '\n', 0x1A};
constexpr uint32_t kVersion = 1;
constexpr size_t kRequestHeaderBytes = 16;
constexpr size_t kMaxTicketBytes = 64;
constexpr size_t kReplyHeaderBytes = 24;
constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxFdsPerBatch = 253;  // SCM_MAX_FD of Linux
constexpr char kBatchByte = 'F';

enum Status : uint32_t { kOk = 0, kTicketRefused = 1, kAccessDenied = 2, kMalformedRequest = 3 };

inline void PutUint32(uint32_t value, unsigned char* out) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<unsigned char>(value >> (8 * i));
}

inline uint32_t GetUint32(const unsigned char* in) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(in[i]) << (8 * i);
  return value;
}

}  // namespace ticket_protocol

// Holds every message of RedeemTicket; a smaller buffer cuts it.
constexpr size_t kRedeemErrorBytes = 1280;

// Sends `ticket` to the service at `socket_path`, and puts the descriptors that it stands for into `fds` in slab order
// and their number into `*fd_count`. They are close-on-exec and belong to the caller. Waits at most `timeout_ms` in all
// (-1: without limit). Returns 0, or an errno value with a sentence in `error` (which may be null); then *fd_count is
// 0, no descriptor is left open, and the ticket must be taken for used:
//   EINVAL        an argument cannot be right: path empty or over 107 bytes, ticket empty or over 64 bytes, null
//   pointers ENOENT, ECONNREFUSED, ...  what connect says: the service is not running there, or not for this user
//   EACCES        the service refused the ticket (unknown, used, expired, another user's) or this user
//   ENOBUFS       there are more descriptors than `fd_capacity`
//   EMFILE        descriptors were lost on the way: this process is at its RLIMIT_NOFILE
//   ETIMEDOUT     `timeout_ms` has passed
//   ECONNRESET    the service went away in the middle
//   EPROTO        what answers there is not weightbroker, or another version of it
inline int RedeemTicket(const char* socket_path, const void* ticket, size_t ticket_size, int* fds, size_t fd_capacity,
                        size_t* fd_count, int timeout_ms, char* error, size_t error_size);

namespace redeem_internal {

// Where and until when; and where to say what went wrong.
struct Call {
  const char* socket_path;
  int64_t deadline_ms;  // of CLOCK_MONOTONIC; -1 for none
  char* error;
  size_t error_size;

  int Fail(int code, const char* what, const char* why) const {
    if (error != nullptr && error_size > 0) snprintf(error, error_size, "%s: %s: %s", socket_path, what, why);
    return code;
  }
  int FailByErrno(int code, const char* what) const {
    char buffer[128] = {};
#if defined(__GLIBC__) && defined(_GNU_SOURCE)
    return Fail(code, what, strerror_r(code, buffer, sizeof(buffer)));
#else
    strerror_r(code, buffer, sizeof(buffer));
    return Fail(code, what, buffer);
#endif
  }
};

inline int64_t NowMs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

// Waits for `events`; 0 or ETIMEDOUT or another errno.
inline int WaitFor(const Call& call, int socket, short events) {
  while (true) {
    int wait_ms = -1;
    if (call.deadline_ms >= 0) {
      const int64_t left = call.deadline_ms - NowMs();
      if (left <= 0) return ETIMEDOUT;
      wait_ms = static_cast<int>(left);
    }
    pollfd ready = {};
    ready.fd = socket;
    ready.events = events;
    const int count = poll(&ready, 1, wait_ms);
    if (count > 0) return 0;
    if (count < 0 && errno != EINTR) return errno;
  }
}

// Connects; a full backlog is waited for, since connect does not wait on a non-blocking Unix socket.
inline int ConnectTo(const Call& call, int socket) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, call.socket_path, strlen(call.socket_path));
  while (connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return call.FailByErrno(errno, "cannot connect");
    if (call.deadline_ms >= 0 && NowMs() >= call.deadline_ms) {
      return call.Fail(ETIMEDOUT, "cannot connect", "the service does not take the connection in time");
    }
    poll(nullptr, 0, 2);
  }
  return 0;
}

inline int SendRequest(const Call& call, int socket, const void* ticket, size_t ticket_size) {
  using namespace ticket_protocol;
  unsigned char request[kRequestHeaderBytes + kMaxTicketBytes];
  memcpy(request, kMagic, kMagicBytes);
  PutUint32(kVersion, request + 8);
  PutUint32(static_cast<uint32_t>(ticket_size), request + 12);
  memcpy(request + kRequestHeaderBytes, ticket, ticket_size);
  const size_t size = kRequestHeaderBytes + ticket_size;
  for (size_t sent = 0; sent < size;) {
    const ssize_t count = send(socket, request + sent, size - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      if (const int code = WaitFor(call, socket, POLLOUT)) return call.FailByErrno(code, "cannot send the ticket");
    } else if (errno != EINTR) {
      return call.FailByErrno(errno == EPIPE ? ECONNRESET : errno, "cannot send the ticket");
    }
  }
  return 0;
}

inline int ReceiveBytes(const Call& call, int socket, void* bytes, size_t size) {
  for (size_t received = 0; received < size;) {
    const ssize_t count = recv(socket, static_cast<char*>(bytes) + received, size - received, 0);
    if (count > 0) {
      received += static_cast<size_t>(count);
    } else if (count == 0) {
      return call.Fail(ECONNRESET, "no reply to the ticket", "the service closed the connection");
    } else if (errno == EAGAIN) {
      if (const int code = WaitFor(call, socket, POLLIN)) return call.FailByErrno(code, "no reply to the ticket");
    } else if (errno != EINTR) {
      return call.FailByErrno(errno, "no reply to the ticket");
    }
  }
  return 0;
}

// Reads the reply up to its descriptors.
inline int ReceiveReply(const Call& call, int socket, size_t* fd_count) {
  using namespace ticket_protocol;
  unsigned char reply[kReplyHeaderBytes];
  if (const int code = ReceiveBytes(call, socket, reply, sizeof(reply))) return code;
  if (memcmp(reply, kMagic, kMagicBytes) != 0) {
    return call.Fail(EPROTO, "unknown reply to the ticket", "what answers there is not weightbroker");
  }
  if (GetUint32(reply + 8) != kVersion) {
    return call.Fail(EPROTO, "unknown reply to the ticket", "the service speaks another version of the protocol");
  }
  const uint32_t status = GetUint32(reply + 12);
  const uint32_t count = GetUint32(reply + 16);
  const uint32_t message_size = GetUint32(reply + 20);
  if (message_size > kMaxMessageBytes || (status != kOk && count != 0)) {
    return call.Fail(EPROTO, "malformed reply to the ticket", "a number is out of its range");
  }
  char message[kMaxMessageBytes + 1] = {};
  if (const int code = ReceiveBytes(call, socket, message, message_size)) return code;
  if (status == kOk) {
    *fd_count = count;
    return 0;
  }
  const bool refused = status == kTicketRefused || status == kAccessDenied;
  return call.Fail(refused ? EACCES : EPROTO, "the service refused the ticket", message);
}

// Takes the descriptors out of a message: as many as there is room for into `fds`, and closes the others. Returns how
// many there were.
inline size_t TakeDescriptors(msghdr* message, int* fds, size_t capacity) {
  size_t found = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++found) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (found < capacity) {
        fds[found] = fd;
      } else {
        close(fd);
      }
    }
  }
  return found;
}

// Receives one batch of exactly `wanted` descriptors. *taken says how many are open in `fds` then, also on failure.
inline int ReceiveBatch(const Call& call, int socket, int* fds, size_t wanted, size_t* taken) {
  using namespace ticket_protocol;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerBatch * sizeof(int))];
  char byte = 0;
  iovec data = {&byte, 1};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  ssize_t count = -1;
  *taken = 0;
  while (true) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (count >= 0) break;
    if (errno == EAGAIN) {
      if (const int code = WaitFor(call, socket, POLLIN)) return call.FailByErrno(code, "no descriptors");
    } else if (errno != EINTR) {
      return call.FailByErrno(errno, "no descriptors");
    }
  }
  const size_t found = TakeDescriptors(&message, fds, wanted);
  *taken = found < wanted ? found : wanted;
  if (message.msg_flags & MSG_CTRUNC) {
    return call.Fail(EMFILE, "descriptors were lost",
                     "this process is at its limit of open files; raise RLIMIT_NOFILE (ulimit -n)");
  }
  if (count == 0) return call.Fail(ECONNRESET, "no descriptors", "the service closed the connection");
  if (found != wanted || byte != kBatchByte) {
    return call.Fail(EPROTO, "malformed reply to the ticket",
                     "a batch has another number of descriptors than announced");
  }
  return 0;
}

inline int ReceiveAll(const Call& call, int socket, int* fds, size_t count, size_t* received) {
  while (*received < count) {
    const size_t left = count - *received;
    const size_t wanted = left < ticket_protocol::kMaxFdsPerBatch ? left : ticket_protocol::kMaxFdsPerBatch;
    size_t taken = 0;
    const int code = ReceiveBatch(call, socket, fds + *received, wanted, &taken);
    *received += taken;
    if (code != 0) return code;
  }
  return 0;
}

// Reads all of the service's answer. On failure no descriptor is left open.
inline int ReceiveDescriptors(const Call& call, int socket, int* fds, size_t fd_capacity, size_t* fd_count) {
  size_t count = 0;
  if (const int code = ReceiveReply(call, socket, &count)) return code;
  if (count > fd_capacity) return call.Fail(ENOBUFS, "no room", "there are more descriptors than fd_capacity");
  const int code = ReceiveAll(call, socket, fds, count, fd_count);
  if (code != 0) {
    for (size_t i = 0; i < *fd_count; ++i) close(fds[i]);
    *fd_count = 0;
  }
  return code;
}

inline int Exchange(const Call& call, int socket, const void* ticket, size_t ticket_size, int* fds, size_t fd_capacity,
                    size_t* fd_count) {
  if (const int code = ConnectTo(call, socket)) return code;
  if (const int code = SendRequest(call, socket, ticket, ticket_size)) return code;
  return ReceiveDescriptors(call, socket, fds, fd_capacity, fd_count);
}

}  // namespace redeem_internal

inline int RedeemTicket(const char* socket_path, const void* ticket, size_t ticket_size, int* fds, size_t fd_capacity,
                        size_t* fd_count, int timeout_ms, char* error, size_t error_size) {
  const redeem_internal::Call call = {socket_path != nullptr ? socket_path : "(no path)",
                                      timeout_ms < 0 ? -1 : redeem_internal::NowMs() + timeout_ms, error, error_size};
  if (fd_count == nullptr) return call.Fail(EINVAL, "bad argument", "fd_count is null");
  *fd_count = 0;
  if (socket_path == nullptr || *socket_path == '\0' || strlen(socket_path) >= sizeof(sockaddr_un::sun_path)) {
    return call.Fail(EINVAL, "bad argument", "the socket's path is empty or has more than 107 bytes");
  }
  if (ticket == nullptr || ticket_size == 0 || ticket_size > ticket_protocol::kMaxTicketBytes) {
    return call.Fail(EINVAL, "bad argument", "the ticket is empty or has more than 64 bytes");
  }
  if (fds == nullptr && fd_capacity > 0) return call.Fail(EINVAL, "bad argument", "fds is null");

  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_fd < 0) return call.FailByErrno(errno, "cannot create a socket");
  const int code = redeem_internal::Exchange(call, socket_fd, ticket, ticket_size, fds, fd_capacity, fd_count);
  close(socket_fd);
  return code;
}

}  // namespace weightbroker

#endif  // WEIGHTBROKER_REDEEM_H_
