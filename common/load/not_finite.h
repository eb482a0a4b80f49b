// What a weight that FP8 blocks cannot hold comes to, wherever it was found. Thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/plan/plan.h"

namespace weightbroker {

// WEIGHT_NOT_FINITE naming the tensor, and the row and column of `element` in its shard.
absl::Status WeightNotFinite(const TensorPlacement& tensor, int64_t element);

}  // namespace weightbroker
