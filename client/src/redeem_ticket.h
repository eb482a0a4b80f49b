// The exchange of weightbroker/redeem.h with our own errors and descriptors that close themselves.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "common/base/unique_fd.h"

namespace weightbroker::client {

// The `fd_count` descriptors that `ticket` stands for, in slab order. TICKET_INVALID, DEADLINE_EXCEEDED,
// SERVICE_UNAVAILABLE, PROTOCOL_ERROR, or SYSTEM_ERROR (this process is at its limit of open files). Thread-safe.
absl::StatusOr<std::vector<UniqueFd>> RedeemTicket(const std::string& socket_path, const std::string& ticket,
                                                   size_t fd_count, Deadline deadline);

}  // namespace weightbroker::client
