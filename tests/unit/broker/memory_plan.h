// What a loader would plan, for tests.
#pragma once

#include <cstdint>

#include "server/broker/registry.h"

namespace weightbroker::testing {

// One shard, of rank 0 on the host.
inline MemoryPlan PlanOf(int64_t slab_bytes, int64_t read_bytes, int64_t tensor_count) {
  return {.shards = {{.slab_bytes = slab_bytes, .tensor_count = tensor_count}}, .read_bytes = read_bytes};
}

}  // namespace weightbroker::testing
