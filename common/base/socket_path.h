// Where the service's socket is: one rule for the service and for everyone who calls it. libc only. Thread-safe, as
// long as nobody changes the environment meanwhile.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightbroker {

inline constexpr size_t kMaxSocketPathBytes = 107;  // sockaddr_un::sun_path without its NUL

// Where the service listens unless told otherwise.
struct DefaultSocket {
  std::string path;
  bool create_folder = false;  // for ListenerOptions: set for the built-in places
};

// $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock for root, else
// $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock. SOCKET_PATH_INVALID if none of them is to be had.
absl::StatusOr<DefaultSocket> FindDefaultSocket();

// FindDefaultSocket's path.
absl::StatusOr<std::string> DefaultSocketPath();

// SOCKET_PATH_INVALID for a path that the service's socket cannot have: empty, relative, abstract, with a NUL in it,
// naming a folder, or longer than kMaxSocketPathBytes.
absl::Status CheckSocketPath(const std::string& path);

}  // namespace weightbroker
