// The end of a loader's conversation with the broker: one rank's sealed slabs and their manifest.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "common/memory/host_slab.h"

namespace weightbroker {

struct ShardFacts {
  int32_t rank = 0;
  int64_t tensor_count = 0;
  int64_t read_bytes = 0;
};

// Sends LoadSealed with the slabs' descriptors and the manifest's. SERVICE_UNAVAILABLE if the broker has gone.
absl::Status SendShard(int control_fd, const ShardFacts& facts, std::span<const SealedSlab> slabs,
                       const std::string& manifest);

}  // namespace weightbroker
