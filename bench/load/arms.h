// Which arms there are for a setup.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/model_folder.h"
#include "bench/load/sample.h"
#include "bench/load/size_bench.h"

namespace weightbroker::bench {

// Ours, those that the setup asks for besides, plain reading into host memory, and the rivals that can run and suit the
// page cache's state. Their ceilings are reading, "read_direct" or "read_cached", and what the memory that they fill
// allows, "fill", "pinned_copy" or "pinned_copy_all". INVALID_ARGUMENT if LoadSetup::arms names one that there is not.
absl::StatusOr<std::vector<Arm>> MakeArms(const LoadSetup& setup, const ModelFolder& model, CacheState state);

}  // namespace weightbroker::bench
