// Messages with file descriptors over Unix sockets of type SOCK_SEQPACKET, for our own processes.
//
//   RETURN_IF_ERROR(SendMessage(socket, bytes, {fd1, fd2}));
//   auto message = ReceiveMessage(socket);                   // ok with closed == true once the other side has gone
//
// Thread-safe on different sockets; on one socket, one sender and one receiver at a time.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

inline constexpr int kMaxFdsPerMessage = 253;  // SCM_MAX_FD of Linux

struct SocketPair {
  UniqueFd first;
  UniqueFd second;
};

// A connected pair, both close-on-exec.
absl::StatusOr<SocketPair> CreateSeqpacketPair();

struct SocketMessage {
  bool closed = false;  // the other side has closed; nothing else is set
  std::string bytes;
  std::vector<UniqueFd> fds;
};

// Sends one message, at most 64 KiB with at most kMaxFdsPerMessage descriptors, which stay the caller's.
// SERVICE_UNAVAILABLE if the other side has gone (never SIGPIPE); SYSTEM_ERROR otherwise.
absl::Status SendMessage(int socket, std::string_view bytes, std::span<const int> fds = {});

// Sends over any Unix socket if it can be done without waiting. 0, or the errno: EAGAIN if there is no room,
// ETOOMANYREFS if too many descriptors of this user are in flight. A stream may take a part of the bytes, and all
// descriptors with it, without saying so: send one byte with them there.
int SendNow(int socket, std::string_view bytes, std::span<const int> fds = {});

// Receives one message, waiting for it. PROTOCOL_ERROR if descriptors were lost (MSG_CTRUNC: this process is at its
// RLIMIT_NOFILE) or the message is over-long: none of its descriptors leak. DEADLINE_EXCEEDED after `timeout`.
absl::StatusOr<SocketMessage> ReceiveMessage(int socket,
                                             std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// Raises RLIMIT_NOFILE to its hard limit. Returns the limit that is in force.
int64_t RaiseFdLimit();

// The same, and SYSTEM_ERROR saying where to raise the hard limit if that is under `least`.
absl::StatusOr<int64_t> RaiseFdLimitTo(int64_t least);

}  // namespace weightbroker
