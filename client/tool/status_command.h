// weightbroker status: one line, and an exit code for scripts and probes; and what is missing of what was configured.
#pragma once

#include "client/tool/service_commands.h"

namespace weightbroker::tool {

// kDone if the service is READY, kNotReady if it answers and is not, kUnavailable if none answers.
ExitCode RunStatus(const ServiceFlags& service);

}  // namespace weightbroker::tool
