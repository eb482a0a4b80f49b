// Which arms there are for a setup.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/model_folder.h"
#include "bench/load/sample.h"
#include "bench/load/size_bench.h"

namespace weightbroker::bench {

// Ours, those that the setup asks for besides, plain reading into host memory, and the rivals that can run. Their
// ceilings are `read_ceiling` and what the memory that they fill allows. INVALID_ARGUMENT if LoadSetup::arms names one
// that there is not. `setup` and `model` must outlive them.
absl::StatusOr<std::vector<Arm>> MakeArms(const LoadSetup& setup, const ModelFolder& model,
                                          const std::string& read_ceiling);

}  // namespace weightbroker::bench
