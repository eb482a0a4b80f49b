#include "server/endpoint/endpoint.h"

#include <grpcpp/server.h>
#include <grpcpp/server_posix.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

absl::Status CheckRoom(const Peer& peer, int most, PeerTable* peers) {
  const int open = peers->CountOpenOf(peer.uid, most);
  if (open < most) return absl::OkStatus();
  return MakeError(
      Reason::kTooManyRequests,
      absl::StrCat("user ", peer.uid, " has ", open,
                   " connections, the most that one user may (--max_connections_per_uid): close some"),
      {{"limit", "max_connections_per_uid"}, {"uid", absl::StrCat(peer.uid)}, {"connections", absl::StrCat(open)}});
}

AcceptorOptions ToAcceptorOptions(EndpointOptions options) {
  AcceptorOptions result{.listen_fd = options.listen_fd,
                         .tickets = options.tickets,
                         .access = std::move(options.access),
                         .handshake_timeout = options.handshake_timeout,
                         .max_pending_handshakes = options.max_pending_handshakes};
  result.on_refused = std::move(options.on_refused);
  result.serve_http2 = [server = options.server, peers = options.peers](UniqueFd connection, const Peer& peer) {
    Peer known = peer;
    known.details = ReadPeerDetails(connection.get(), peer.pid);
    peers->Add(connection.get(), known);  // before the first call can ask for it
    grpc::AddInsecureChannelFromFd(server, connection.release());
  };
  const int most = options.max_connections_per_uid;
  if (most > 0)
    result.admit_http2 = [=, peers = options.peers](const Peer& peer) { return CheckRoom(peer, most, peers); };
  return result;
}

}  // namespace

Endpoint::Endpoint(EndpointOptions options) : acceptor_(ToAcceptorOptions(std::move(options))) {}

Endpoint::~Endpoint() = default;

void Endpoint::Stop() { acceptor_.Stop(); }

}  // namespace weightbroker
