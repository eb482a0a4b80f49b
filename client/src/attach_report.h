// Tells the service that its weights were not attached, and what came of it, for its metrics. Of those that were, the
// lease tells: see LeaseOptions.
#pragma once

#include "absl/status/status.h"
#include "client/src/connection.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// Waits for at most half a second, and tells nobody where `why_not` is that there is no service. Whether it has been
// heard is not said: a service that is older than the call is done without.
void ReportNotAttached(const Connection& connection, v1::ReportAttachRequest::Outcome outcome,
                       const absl::Status& why_not);

}  // namespace weightbroker::client
