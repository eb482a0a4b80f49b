// `weightbroker groups`: which engine groups there are, who is active in them, and removing one.
#pragma once

#include <string>

#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

struct GroupsFlags {
  std::string remove;  // the name of a group; empty: list them
  bool force = false;
};

ExitCode RunGroups(const ServiceFlags& service, const GroupsFlags& flags);

}  // namespace weightbroker::tool
