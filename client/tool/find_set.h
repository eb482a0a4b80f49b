// Which weight set a command is about, as its user names it: by a fingerprint, or by a model and what goes with it.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::tool {

struct SetFlags {
  std::string weights;        // a fingerprint, or at least 8 digits of it; or a model
  std::string torch_version;  // with a model
  v1::WeightSpec spec;        // with a model, but for the model itself
  std::optional<int32_t> rank;
};

// Whether `weights` can only be the beginning of a fingerprint: models have a ':' or a '/'.
bool IsFingerprint(const std::string& weights);

// The spec and environment that are meant, with a model.
v1::WeightSpec SpecOf(const SetFlags& flags);
v1::Environment EnvironmentOf(const SetFlags& flags);

// The resident set that is meant. WEIGHT_SET_UNKNOWN and WEIGHT_SET_AMBIGUOUS for a fingerprint; for a model what
// Export by spec says: NOT_RESIDENT, STILL_LOADING, or FINGERPRINT_MISMATCH with every differing field.
absl::StatusOr<v1::WeightSet> FindResidentSet(const client::Connection& connection, const SetFlags& flags,
                                              client::Deadline deadline);

// The ranks of `set` that this is about: the one that was asked for, or all that the service holds.
std::vector<int32_t> RanksOf(const v1::WeightSet& set, const SetFlags& flags);

}  // namespace weightbroker::tool
