// Who is on the other side of a connection, as the kernel told us when it was accepted.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"

namespace weightbroker {

struct PeerDetails {
  std::vector<gid_t> groups;  // supplementary
  std::string program;        // what the process runs, as the kernel names it; empty if it has gone already
};

struct Peer {
  uid_t uid = 0;
  gid_t gid = 0;
  pid_t pid = 0;
  std::shared_ptr<const PeerDetails> details = nullptr;  // of a connection that has become gRPC's
};

// Of a peer whose process is still there. Never fails: what cannot be read is left out.
std::shared_ptr<const PeerDetails> ReadPeerDetails(int socket, pid_t pid);

// Reads SO_PEERCRED: the credentials with which the other side connected. SYSTEM_ERROR if `socket` is no Unix socket.
absl::StatusOr<Peer> ReadPeer(int socket);

// Reads SO_PEERGROUPS: the supplementary groups with which the other side connected.
absl::StatusOr<std::vector<gid_t>> ReadPeerGroups(int socket);

// Connections handed to gRPC by descriptor have no address of their own: ServerContext::peer() is "fd:<number>". This
// table is written before the descriptor is handed over, and is where a call finds its caller's credentials. A number
// is not used again while a call lives on it, because gRPC keeps it open until then. Thread-safe.
class PeerTable {
 public:
  void Add(int fd, const Peer& peer);

  // The caller of a gRPC call whose ServerContext::peer() is `grpc_peer`; nullopt for a connection that is not ours.
  std::optional<Peer> Find(const std::string& grpc_peer) const;

  // Counts those of one user. Cheap unless they seem to be `enough`; then those that have been closed are swept first.
  int CountOpenOf(uid_t uid, int enough);

  // Counts the connections still open: gRPC tells nobody when it closes one, so entries whose descriptor is no longer
  // the same socket are swept here.
  int CountOpen();

 private:
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Entry {
    Peer peer;
    ino_t socket_inode = 0;
  };

  mutable Mutex mutex_;
  std::map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::map<uid_t, int> counts_ ABSL_GUARDED_BY(mutex_);  // of entries_
};

}  // namespace weightbroker
