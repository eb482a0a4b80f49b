// weightbroker desired: what a service is configured to hold, against what it holds; and a check of the file offline.
#pragma once

#include <string>

#include "client/tool/service_commands.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {

// kDone if all of it is there, and also if the service is configured to hold nothing; kNotReady if something is missing
// or its file was refused; kUnavailable if no service answers.
ExitCode RunDesired(const ServiceFlags& service);

// kDone if `file` is one that a service would take, kRefused otherwise.
ExitCode RunDesiredCheck(const std::string& file, bool json);

// The service's status as people are told it: INCOMPLETE in place of LOADING where nothing is being loaded, because a
// set could not be, or because the file was refused.
std::string StatusName(const v1::HealthResponse& health);

// Whether all that is configured is there, as far as that is known.
bool HasAllDesired(const v1::HealthResponse& health);

// A line for each set and alias, and one if the file was refused; nothing if nothing is configured.
void PrintDesired(const v1::HealthResponse& health);

}  // namespace weightbroker::tool
