// Where the service's socket is, by the same rule for the service and for everyone who calls it. Thread-safe but for the
// environment, which nobody may change meanwhile.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightbroker {

// The longest path that sockaddr_un takes, with its terminating zero.
inline constexpr size_t kMaxSocketPathBytes = 107;

// Where the service listens unless told otherwise: $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock for
// root, else $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock. SOCKET_PATH_INVALID if none of them is to be had.
absl::StatusOr<std::string> DefaultSocketPath();

// SOCKET_PATH_INVALID for a path that no Unix socket can have: empty, abstract (a leading NUL or '@'), with a NUL in it,
// or longer than kMaxSocketPathBytes.
absl::Status CheckSocketPath(const std::string& path);

}  // namespace weightbroker
