// What the weights are that a spec and an environment mean, and how they differ from what is resident.
#pragma once

#include "client/tool/find_set.h"
#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

// Prints the fingerprint of a model, all that it is made of, whether that is resident, and if not, every field in which
// the closest resident set differs, with both values. kDone whether or not it is resident.
ExitCode RunFingerprint(const ServiceFlags& service, const SetFlags& flags);

}  // namespace weightbroker::tool
