// What a Register would come to.
#pragma once

#include "client/tool/output.h"
#include "client/tool/service_commands.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {

// `request` without more; it is sent as a dry run. kRefused if it would not fit.
ExitCode RunDryRun(const ServiceFlags& service, v1::RegisterRequest request, std::chrono::milliseconds timeout);

}  // namespace weightbroker::tool
