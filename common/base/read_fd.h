// Reads what another process handed over in a descriptor: a memfd, from its beginning, wherever its offset is.
//
//   ASSIGN_OR_RETURN(const std::string bytes, ReadFd(fd, size_bytes, "reading a manifest"));
//   if (bytes.size() < size_bytes) ...                   // it ends before
//
// Thread-safe: the descriptor's offset is neither used nor moved.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace weightbroker {

// The first `size_bytes` of `fd`, or fewer if it ends before. SYSTEM_ERROR with `what` and the errno otherwise.
absl::StatusOr<std::string> ReadFd(int fd, size_t size_bytes, const std::string& what);

}  // namespace weightbroker
