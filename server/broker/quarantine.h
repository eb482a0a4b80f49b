// Takes shards out of service for good, with the log lines that say so: the one way there is.
//
//   QuarantineShard(*registry, set, /*rank=*/0, "its tensor \"w\" has another digest than ...");
//
// Thread-safe.
#pragma once

#include <string>

#include "server/broker/registry.h"

namespace weightbroker {

// See Registry::Quarantine. False if it was in quarantine already, or is not resident.
bool QuarantineShard(Registry& registry, const WeightSetRef& set, int32_t rank, const std::string& why);

}  // namespace weightbroker
