// The Register that each set of a desired state stands for, checked as far as that goes without its model.
//
//   ASSIGN_OR_RETURN(const DesiredState desired, ReadDesiredFile(files, path));
//   ASSIGN_OR_RETURN(const std::vector<v1::RegisterRequest> requests, ToRegisterRequests(desired, path));
//
// Thread-safe: a pure function.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/desired/desired_state.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

// In the order of the sets. CONFIGURATION_INVALID as ParseDesiredState has it: for what no model could make sense of,
// for ranks that the spec does not have, and for a set that is the same weights as another, or may be.
absl::StatusOr<std::vector<v1::RegisterRequest>> ToRegisterRequests(const DesiredState& desired,
                                                                    const std::string& file);

}  // namespace weightbroker
