// weightbroker scrub: has the service check resident bytes against their digests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

struct ScrubFlags {
  std::string fingerprint;  // or at least 8 digits of it; empty: all that is resident
  std::optional<int32_t> rank;
  int64_t bytes_per_second = 0;  // 0: the service's own cap
};

// kRefused if a shard is damaged or could not be checked.
ExitCode RunScrub(const ServiceFlags& service, const ScrubFlags& flags);

}  // namespace weightbroker::tool
