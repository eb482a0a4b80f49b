// The tensors of a resident weight set, as an engine would find them.
#pragma once

#include "client/tool/find_set.h"
#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

// Prints, for each rank, its slabs and a line for each tensor. Takes no lease.
ExitCode RunExport(const ServiceFlags& service, const SetFlags& flags);

}  // namespace weightbroker::tool
