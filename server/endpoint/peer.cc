#include "server/endpoint/peer.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/numbers.h"
#include "common/base/error.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

constexpr std::string_view kPrefix = "fd:";

// The inode of an open socket; 0 if the descriptor is not one (any more).
ino_t SocketInode(int fd) {
  struct stat stat_buffer {};
  if (fstat(fd, &stat_buffer) != 0 || !S_ISSOCK(stat_buffer.st_mode)) return 0;
  return stat_buffer.st_ino;
}

}  // namespace

absl::StatusOr<Peer> ReadPeer(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return SystemError("cannot read who connected", errno);
  }
  return Peer{.uid = credentials.uid, .gid = credentials.gid, .pid = credentials.pid};
}

absl::StatusOr<std::vector<gid_t>> ReadPeerGroups(int socket) {
  std::vector<gid_t> groups(64);
  while (true) {
    auto size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    const bool read = getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) == 0;
    if (!read && errno != ERANGE) return SystemError("cannot read the groups of who connected", errno);
    groups.resize(size / sizeof(gid_t));
    if (read) return groups;
  }
}

void PeerTable::Add(int fd, const Peer& peer) {
  const Entry entry = {.peer = peer, .socket_inode = SocketInode(fd)};
  MutexLock lock(mutex_);
  entries_[fd] = entry;
}

std::optional<Peer> PeerTable::Find(const std::string& grpc_peer) const {
  int fd = -1;
  const std::string_view text = grpc_peer;
  if (!text.starts_with(kPrefix) || !absl::SimpleAtoi(ToAbsl(text.substr(kPrefix.size())), &fd)) return std::nullopt;
  MutexLock lock(mutex_);
  const auto it = entries_.find(fd);
  if (it == entries_.end()) return std::nullopt;
  return it->second.peer;
}

int PeerTable::CountOpen() {
  MutexLock lock(mutex_);
  std::erase_if(entries_, [](const auto& entry) {
    const ino_t inode = SocketInode(entry.first);
    return inode == 0 || inode != entry.second.socket_inode;
  });
  return static_cast<int>(entries_.size());
}

}  // namespace weightbroker
