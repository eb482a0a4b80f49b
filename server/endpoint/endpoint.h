// The one socket that carries both gRPC and file descriptors. It accepts, checks who is there, peeks at the first
// bytes, and hands the connection to gRPC (the HTTP/2 preface) or to the descriptor sender (the ticket magic, see
// client/include/weightbroker/redeem.h for the protocol). Whoever says nothing or garbage is dropped when
// `handshake_timeout` has passed; others never wait for them.
//
//   Endpoint endpoint({.listen_fd = listener.fd(), .server = grpc_server.get(), .tickets = &tickets, .access =
//   policy});
//   ... serving ...
//   endpoint.Stop();            // accepts no more; connections that gRPC has are gRPC's
//
// gRPC drops a silent connection only if the server was built with GRPC_ARG_MAX_CONNECTION_IDLE_MS.
//
// Thread-safe. Runs one thread of its own; handshakes are non-blocking in it.
#pragma once

#include <chrono>
#include <memory>

#include "server/endpoint/acceptor.h"
#include "server/endpoint/access.h"
#include "server/endpoint/peer.h"
#include "server/endpoint/ticket_box.h"

namespace grpc {
class Server;
}

namespace weightbroker {

struct EndpointOptions {
  int listen_fd = -1;              // not owned
  grpc::Server* server = nullptr;  // must outlive the endpoint
  TicketBox* tickets = nullptr;    // must outlive the endpoint
  PeerTable* peers = nullptr;      // must outlive the endpoint; written before a connection's first call
  AccessPolicy access = {};
  std::chrono::milliseconds handshake_timeout{2000};
  int max_pending_handshakes = 1024;  // beyond that the oldest is dropped
  // Called in the endpoint's thread for each connection refused, dropped, or ticket refused, with one of the reasons in
  // acceptor.h for the metrics. May be empty.
  RefusalCallback on_refused = {};
  int max_connections_per_uid = 0;  // that gRPC has; further ones are refused in its words. 0: no limit
};

class Endpoint {
 public:
  explicit Endpoint(EndpointOptions options);
  ~Endpoint();  // stops
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Accepts no more and drops what has not been handed to gRPC. Call it before grpc::Server::Shutdown. May be called
  // twice, but not from `on_refused`.
  void Stop();

  // Whether the endpoint's thread takes notice within `timeout`: it hangs if not. Not to be called during or after
  // Stop.
  bool Responds(std::chrono::milliseconds timeout) { return acceptor_.Responds(timeout); }

 private:
  Acceptor acceptor_;
};

}  // namespace weightbroker
