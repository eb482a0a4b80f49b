// What each rank of a model would hold, found offline: nothing is allocated, no service is asked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "client/tool/output.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::tool {

struct PlanFlags {
  std::string folder;
  v1::WeightSpec spec;          // but for its model
  std::optional<int32_t> rank;  // none: the table shows the first rank's tensors, JSON those of all
  std::string architecture_dir;
  bool json = false;
};

// Prints the plan: of each tensor its type, shape, bytes, and which part of which tensor of the checkpoint it is; then
// the totals of each rank.
ExitCode RunPlan(const PlanFlags& flags);

}  // namespace weightbroker::tool
