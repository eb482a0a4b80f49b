// From the words of a request to the weight set that they mean: the spec completed, the folder found, its identity
// read, the fingerprint computed; and, where that is not the one that is resident, what differs.
//
//   auto resolved = ResolveSpec(context, request.spec(), request.environment());      // blocks on files
//   if (!resolved.ok()) return resolved.status();
//   if (auto closest = FindClosest(*context.registry, resolved->fingerprint, resolved->spec.model())) ...
//
// Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/identity/fingerprint.h"
#include "server/broker/metrics.h"
#include "server/broker/registry.h"
#include "server/broker/service_context.h"

namespace weightbroker {

struct ResolvedSpec {
  v1::WeightSpec spec;  // completed
  v1::Environment environment;
  std::shared_ptr<const CheckpointIdentity> identity;
  Fingerprint fingerprint;
};

// Fails as CompleteSpec, CheckEnvironment, ModelResolver::Resolve and IdentityCache::Get do.
absl::StatusOr<ResolvedSpec> ResolveSpec(const ServiceContext& context, const v1::WeightSpec& spec,
                                         const v1::Environment& environment);

// The resident set that a spec stood for before files were lost: what it was made from is gone in part or altogether,
// what is left of it is unchanged, and nothing else about it differs from what is asked for. By stat alone, which
// blocks. Null if there is none.
WeightSetRef FindSetOfGoneFiles(const ServiceContext& context, const v1::WeightSpec& spec,
                                const v1::Environment& environment);

struct ClosestSet {
  WeightSetRef set;
  std::vector<v1::FingerprintDifference> differences;  // requested against `set`, sorted by field
};

// Of the sets of `model` that are resident or being loaded, the one that differs from `requested` in the fewest fields.
std::optional<ClosestSet> FindClosest(const Registry& registry, const Fingerprint& requested, const std::string& model);

// FINGERPRINT_MISMATCH with every field that differs and both values, in the metadata and the message; where they are
// more than fit, with the number left out. Counts each field.
absl::Status MismatchError(Metrics& metrics, const std::string& requested_fingerprint, const ClosestSet& closest);

}  // namespace weightbroker
