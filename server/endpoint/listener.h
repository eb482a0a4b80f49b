// The service's listening Unix socket, owned by us and not by gRPC, which binds over a live socket and unlinks
// another's.
//
//   auto listener = Listener::Create({.path = "/run/weightbroker/weightbroker.sock"});
//   if (!listener.ok()) return listener.status();   // SOCKET_IN_USE, SOCKET_PATH_INVALID, SOCKET_UNUSABLE: one
//   sentence Endpoint endpoint({.listen_fd = listener->fd(), ...});
//
// Create takes a lock file beside the socket (path + ".lock"), tests whether a live service answers there, replaces a
// stale socket, and sets mode and group before it listens with a backlog of 4,096. A live service is never disturbed.
// The lock file stays behind for good: removing it would let two services hold locks on two files of the same name.
// libc only: the keeper uses it without gRPC. Move-only, not thread-safe.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/socket_path.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

struct ListenerOptions {
  std::string path = {};                      // absolute, at most kMaxSocketPathBytes
  mode_t mode = 0660;                         // of the socket
  std::optional<gid_t> group = std::nullopt;  // of the socket; the process's own if unset
  // Makes the socket's folder (mode 0755, its parent must be there) if it is missing. Meant for the default path: a
  // missing folder on a path that somebody typed is more likely a mistake. 0755, because the socket's own mode says who
  // may connect and the lock file is 0600.
  bool create_folder = false;
  int type = SOCK_STREAM;  // of the socket
  // For so long a socket that somebody answers on without the lock, and a lock that a dying process has, are waited
  // for: what is left of a service that was killed has them for as long as it takes to end.
  std::chrono::milliseconds patience{0};
};

// A listener taken apart, so that this process after execve, or its successor, goes on with the same socket.
struct ListenerParts {
  std::string path;
  dev_t device = 0;  // of the socket's file
  ino_t inode = 0;
  UniqueFd lock;
  UniqueFd socket;
};

class Listener {
 public:
  // Fails with
  //   SOCKET_PATH_INVALID  empty, relative, abstract or over-long path;
  //   SOCKET_IN_USE        a live service holds the lock, or something answers there still; the process is named;
  //   SOCKET_UNUSABLE      the folder is missing, not writable or another (non-root) user's; what is there is not a
  //                        socket or another user's; mode or group cannot be set.
  // In every case what was there before is still there as it was, stale sockets aside.
  static absl::StatusOr<Listener> Create(const ListenerOptions& options);

  // Goes on with a listener that was taken apart. The lock file names this process from here on.
  static Listener Adopt(ListenerParts parts);
  // Takes it apart: the socket's file stays, the lock stays taken.
  ListenerParts Release() &&;

  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept;
  // Removes the socket's file if that is still the one made here, and closes the socket. The lock goes last.
  ~Listener();

  int fd() const { return fd_.get(); }
  int lock_fd() const { return lock_.get(); }
  const std::string& path() const { return path_; }
  dev_t device() const { return device_; }
  ino_t inode() const { return inode_; }

 private:
  Listener() = default;

  void Close();

  std::string path_;
  UniqueFd lock_;
  UniqueFd fd_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace weightbroker
