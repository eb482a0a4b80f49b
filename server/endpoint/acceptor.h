// Accepts connections and finds out what they are, without blocking on any of them: HTTP/2 goes to `serve_http2`, a
// ticket gets its descriptors, whoever says nothing or garbage is dropped. The part of the endpoint that knows no gRPC.
//
//   Acceptor acceptor({.listen_fd = fd, .tickets = &tickets, .serve_http2 = [](UniqueFd connection, const Peer& peer)
//   {...}});
//   ...
//   acceptor.Stop();
//
// Thread-safe. Runs one thread of its own; the callbacks are called in it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "common/base/unique_fd.h"
#include "server/endpoint/access.h"
#include "server/endpoint/peer.h"
#include "server/endpoint/ticket_box.h"

namespace weightbroker {

// Called for each connection that is refused or dropped, with the reason for the metrics.
using RefusalCallback = std::function<void(const std::string& reason, const Peer& peer)>;

// Every reason that a RefusalCallback is called with.
namespace refusal {
inline constexpr char kAccessDenied[] = "access_denied";          // not in the access policy
inline constexpr char kHandshakeTimeout[] = "handshake_timeout";  // said too little for too long
inline constexpr char kHandshakeGarbage[] = "handshake_garbage";  // neither HTTP/2 nor a ticket request, or half of one
inline constexpr char kTooManyHandshakes[] = "too_many_handshakes";    // the oldest, when there were too many
inline constexpr char kTicketInvalid[] = "ticket_invalid";             // unknown, used, expired, or another user's
inline constexpr char kTooManyConnections[] = "too_many_connections";  // of one user
inline constexpr char kReplyTimeout[] = "reply_timeout";               // did not take its descriptors in time
}  // namespace refusal

struct AcceptorOptions {
  int listen_fd = -1;            // not owned; made non-blocking
  TicketBox* tickets = nullptr;  // must outlive the acceptor
  AccessPolicy access = {};
  std::chrono::milliseconds handshake_timeout{2000};  // and as long again for taking a reply
  int max_pending_handshakes = 1024;                  // beyond that the oldest is dropped
  // Takes a connection over, non-blocking and close-on-exec, on which the whole HTTP/2 preface, the client's SETTINGS
  // included, is waiting to be read.
  std::function<void(UniqueFd connection, const Peer& peer)> serve_http2 = {};
  RefusalCallback on_refused = {};  // may be empty
  // Asked before a connection is handed to `serve_http2`; an error is what its first call gets. May be empty.
  std::function<absl::Status(const Peer& peer)> admit_http2 = {};
};

class Acceptor {
 public:
  // Ends the process, with a log line, if the kernel gives no epoll instance or no thread: then nothing can be served.
  explicit Acceptor(AcceptorOptions options);
  ~Acceptor();  // stops
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Accepts no more, and drops the connections that have not been handed over. Waits for the callback in progress, so
  // it must not be called from one.
  void Stop();

  // Whether the thread takes notice within `timeout`: it hangs if not. Not to be called during or after Stop, nor from
  // a callback.
  bool Responds(std::chrono::milliseconds timeout);

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace weightbroker
