// How the broker writes the API's enumerations, and what it takes of them. Thread-safe: all functions are pure.
#pragma once

#include <span>
#include <string>

#include "absl/status/status.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// "RESIDENT" for WEIGHT_SET_STATE_RESIDENT.
std::string StateName(v1::WeightSetState state);

// "HOST_MEMFD" for HANDLE_KIND_HOST_MEMFD; the number of one that is not known.
std::string HandleKindName(v1::HandleKind kind);
std::string JoinHandleKinds(std::span<const v1::HandleKind> kinds);

// INVALID_ARGUMENT for more handle kinds than there could be: what a request says comes back in messages and the log.
absl::Status CheckHandleKindCount(int count);

}  // namespace weightbroker
