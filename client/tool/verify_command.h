// Whether what is resident is what the files say.
#pragma once

#include "client/tool/find_set.h"
#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

struct VerifyFlags {
  SetFlags set;
  bool digests_only = false;  // no files: each tensor's bytes against the digest that was taken when it was loaded
};

// Attaches to each rank, loads the same rank from disk in this process, by the service's own plan and loader, and
// compares them byte for byte; one rank after the other, so that it takes as much memory as the largest of them.
// kRefused if anything differs, naming the first tensor and byte that does.
ExitCode RunVerify(const ServiceFlags& service, const VerifyFlags& flags);

}  // namespace weightbroker::tool
