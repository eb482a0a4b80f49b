// Releasing a weight set so that the answer is right even if the broker ends in between.
#pragma once

#include "absl/status/statusor.h"
#include "client/src/connection.h"

namespace weightbroker::client {

// What AdminService.Unregister gives. A call that was lost with its broker may have been carried out or not, and in the
// meantime somebody may have registered the same weights anew: so the next broker is asked what it has, and only the
// registration that was meant is released. If it has gone, the answer is that set, RELEASED, with no count of leases.
absl::StatusOr<v1::UnregisterResponse> UnregisterOnce(const Connection& connection,
                                                      const v1::UnregisterRequest& request, Deadline deadline);

}  // namespace weightbroker::client
