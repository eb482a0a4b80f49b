#include "server/endpoint/peer.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/numbers.h"
#include "common/base/error.h"
#include "common/base/strings.h"
#include "common/base/unique_fd.h"

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
  return Peer{.uid = credentials.uid, .gid = credentials.gid, .pid = credentials.pid, .details = nullptr};
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

// The program's file name would say more, but whose it is not may not read it.
std::shared_ptr<const PeerDetails> ReadPeerDetails(int socket, pid_t pid) {
  auto details = std::make_shared<PeerDetails>();
  if (auto groups = ReadPeerGroups(socket); groups.ok()) details->groups = *std::move(groups);
  const std::string path = "/proc/" + std::to_string(pid) + "/comm";
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char name[64];
  const ssize_t length = file.valid() ? read(file.get(), name, sizeof(name)) : 0;
  if (length > 0) details->program.assign(name, static_cast<size_t>(length) - (name[length - 1] == '\n' ? 1 : 0));
  return details;
}

void PeerTable::Add(int fd, const Peer& peer) {
  const Entry entry = {.peer = peer, .socket_inode = SocketInode(fd)};
  MutexLock lock(mutex_);
  const auto before = entries_.find(fd);
  if (before != entries_.end()) --counts_[before->second.peer.uid];
  ++counts_[peer.uid];
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

int PeerTable::CountOpenOf(uid_t uid, int enough) {
  MutexLock lock(mutex_);
  if (counts_[uid] >= enough) Sweep();
  return counts_[uid];
}

int PeerTable::CountOpen() {
  MutexLock lock(mutex_);
  Sweep();
  return static_cast<int>(entries_.size());
}

void PeerTable::Sweep() {
  for (auto it = entries_.begin(); it != entries_.end();) {
    const ino_t inode = SocketInode(it->first);
    if (inode != 0 && inode == it->second.socket_inode) {
      ++it;
      continue;
    }
    --counts_[it->second.peer.uid];
    it = entries_.erase(it);
  }
  std::erase_if(counts_, [](const auto& count) { return count.second == 0; });
}

}  // namespace weightbroker
