#include "server/endpoint/endpoint.h"

#include <grpcpp/server.h>
#include <grpcpp/server_posix.h>

#include <utility>

namespace weightbroker {
namespace {

AcceptorOptions ToAcceptorOptions(EndpointOptions options) {
  AcceptorOptions result{.listen_fd = options.listen_fd,
                         .tickets = options.tickets,
                         .access = std::move(options.access),
                         .handshake_timeout = options.handshake_timeout,
                         .max_pending_handshakes = options.max_pending_handshakes};
  result.on_refused = std::move(options.on_refused);
  result.serve_http2 = [server = options.server, peers = options.peers](UniqueFd connection, const Peer& peer) {
    peers->Add(connection.get(), peer);  // before the first call can ask for it
    grpc::AddInsecureChannelFromFd(server, connection.release());
  };
  return result;
}

}  // namespace

Endpoint::Endpoint(EndpointOptions options) : acceptor_(ToAcceptorOptions(std::move(options))) {}

Endpoint::~Endpoint() = default;

void Endpoint::Stop() { acceptor_.Stop(); }

}  // namespace weightbroker
