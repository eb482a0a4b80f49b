// Which weight set a command is about, as its user names it: by a fingerprint, by an alias, or by a model and what goes
// with it.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::tool {

inline constexpr size_t kFingerprintDigits = 64;  // of a whole one

struct SetFlags {
  std::string weights;        // a fingerprint, or at least 8 digits of it; or an alias; or a model
  std::string torch_version;  // with a model
  v1::WeightSpec spec;        // with a model, but for the model itself
  std::optional<int32_t> rank;
};

// Whether `weights` can only be a fingerprint or at least 8 digits of one: models have a ':' or a '/'.
bool IsFingerprint(const std::string& weights);

// The spec and environment that are meant, with a model.
v1::WeightSpec SpecOf(const SetFlags& flags);
v1::Environment EnvironmentOf(const SetFlags& flags);

// Whether `weights` can be a model at all.
bool IsModel(const std::string& weights);

// INVALID_ARGUMENT if `flags` say of the set's spec or environment what is not so, naming the field and both values.
absl::Status CheckFlagsFit(const SetFlags& flags, const v1::WeightSet& set);

// The set whose fingerprint begins with `prefix`, in whatever state. WEIGHT_SET_UNKNOWN, WEIGHT_SET_AMBIGUOUS.
absl::StatusOr<v1::WeightSet> FindSetByPrefix(const client::Connection& connection, const std::string& prefix,
                                              client::Deadline deadline);

// The resident set that is meant. For a fingerprint WEIGHT_SET_UNKNOWN, WEIGHT_SET_AMBIGUOUS, or as CheckFlagsFit; for
// an alias ALIAS_UNKNOWN or the same; for a model what Export by spec says: NOT_RESIDENT, STILL_LOADING,
// FINGERPRINT_MISMATCH with every differing field, or MODEL_NOT_FOUND of weights whose files are gone, unless the
// service exports those.
absl::StatusOr<v1::WeightSet> FindResidentSet(const client::Connection& connection, const SetFlags& flags,
                                              client::Deadline deadline);

// The ranks of `set` that this is about: the one that was asked for, or all that the service holds.
std::vector<int32_t> RanksOf(const v1::WeightSet& set, const SetFlags& flags);

}  // namespace weightbroker::tool
