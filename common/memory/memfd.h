// The memfds that slabs are made of; for the classes that make them, and nobody else.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

// An empty one that can be sealed and is closed on exec. `flags` are memfd_create's others. SYSTEM_ERROR.
absl::StatusOr<UniqueFd> CreateMemfd(const char* name, unsigned flags);

// Takes write permission, adds `seals`, and returns a descriptor that was opened for reading: one that was opened for
// writing would let its holder, and everyone it is sent to, share a file offset and reopen it. SYSTEM_ERROR.
absl::StatusOr<UniqueFd> SealAndReopen(UniqueFd fd, int seals);

// The second half of it: a descriptor for reading of the same memfd.
absl::StatusOr<UniqueFd> ReopenForReading(int fd);

}  // namespace weightbroker
