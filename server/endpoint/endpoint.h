// The one socket that carries both gRPC and file descriptors. It accepts, checks who is there, peeks at the first bytes,
// and hands the connection to gRPC (the HTTP/2 preface) or to the descriptor sender (the ticket magic, see
// client/include/weightbroker/redeem.h for the protocol). Whoever says nothing or garbage is dropped when
// `handshake_timeout` has passed; others never wait for them.
//
//   Endpoint endpoint({.listen_fd = listener.fd(), .server = grpc_server.get(), .tickets = &tickets, .access = policy});
//   ... serving ...
//   endpoint.Stop();            // accepts no more; connections that gRPC has are gRPC's
//
// Thread-safe. Runs one thread of its own; handshakes are non-blocking in it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "server/endpoint/peer.h"
#include "server/endpoint/ticket_box.h"

namespace grpc {
class Server;
}

namespace weightbroker {

// Who may connect. Both empty: whoever the socket's mode lets in. Otherwise the peer's uid, or one of its groups (primary
// or supplementary, by SO_PEERGROUPS), must be listed. The service's own uid and root always may.
struct AccessPolicy {
  std::set<uid_t> allowed_uids;
  std::set<gid_t> allowed_gids;
};

struct EndpointOptions {
  int listen_fd = -1;                // not owned
  grpc::Server* server = nullptr;    // must outlive the endpoint
  TicketBox* tickets = nullptr;      // must outlive the endpoint
  AccessPolicy access;
  std::chrono::milliseconds handshake_timeout{2000};
  int max_pending_handshakes = 1024;                  // beyond that the oldest is dropped
  // Called for each connection refused, dropped, or ticket refused, with a reason for the metrics: "access_denied",
  // "handshake_timeout", "handshake_garbage", "too_many_handshakes", "ticket_invalid". May be empty.
  std::function<void(const std::string& reason, const Peer& peer)> on_refused;
};

class Endpoint {
 public:
  explicit Endpoint(EndpointOptions options);
  ~Endpoint();  // stops
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  void Stop();

  PeerTable& peers();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightbroker
