// weightbroker top: what health shows, again and again, with what has changed meanwhile.
#pragma once

#include <chrono>

#include "client/tool/service_commands.h"

namespace weightbroker::tool {

struct TopFlags {
  std::chrono::milliseconds interval{2000};
  int count = 0;  // looks; 0: until it is interrupted
};

// On a terminal each look takes the place of the one before; otherwise they follow each other, with --json one value a
// line. A service that does not answer is said so, and asked again. Gives the last look's exit code.
ExitCode RunTop(const ServiceFlags& service, const TopFlags& flags);

}  // namespace weightbroker::tool
