// The service's listening Unix socket, owned by us and not by gRPC, which binds over a live socket and unlinks another's.
//
//   auto listener = Listener::Create({.path = "/run/weightbroker/weightbroker.sock"});
//   if (!listener.ok()) return listener.status();   // SOCKET_IN_USE, SOCKET_PATH_INVALID, SOCKET_UNUSABLE: one sentence
//   Endpoint::Start(listener->fd(), ...)
//
// Create takes a lock file beside the socket (path + ".lock"), tests whether a live service answers there, replaces a
// stale socket, and sets mode and group before it listens with a backlog of 4,096. A live service is never disturbed. libc
// only: the keeper uses it without gRPC. Move-only, not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

struct ListenerOptions {
  std::string path;            // at most 107 bytes; not abstract
  mode_t mode = 0660;          // of the socket
  std::optional<gid_t> group;  // of the socket; the process's own if unset
};

class Listener {
 public:
  static absl::StatusOr<Listener> Create(const ListenerOptions& options);

  Listener(Listener&&) noexcept;
  Listener& operator=(Listener&&) noexcept;
  // Closes the socket, and removes its file if that is still the one made here. The lock goes last.
  ~Listener();

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

 private:
  Listener() = default;

  std::string path_;
  UniqueFd lock_;
  UniqueFd fd_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Where the service listens unless told otherwise: $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock for
// root, else $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock. SOCKET_PATH_INVALID if none of them is to be had.
absl::StatusOr<std::string> DefaultSocketPath();

}  // namespace weightbroker
