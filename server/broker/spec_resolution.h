// From the words of a request to the weight sets that they mean: the spec completed, the folder found, its identity
// read, the fingerprint computed; and, where that is not one that is there, what differs.
//
//   auto resolved = ResolveSpec(context, request.spec(), request.environment());      // blocks on files
//   if (!resolved.ok()) return resolved.status();
//   const SetsOfSpec found = FindSets(*context.registry, *resolved);
//   if (found.same.empty() && found.closest.has_value()) return MismatchError(metrics, *found.closest);
//
// What the devices are is part of a fingerprint, and a request need not say where a set is: each set is compared with
// the fingerprint that the spec has on that set's own devices.
//
// Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>
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
  std::string architectures_sha256;  // of the service's own architecture files

  // Its fingerprint on devices with these facts.
  Fingerprint FingerprintOn(const DeviceFacts& facts) const;
};

// Fails as CompleteSpec, CheckEnvironment, ModelResolver::Resolve and IdentityCache::Get do.
absl::StatusOr<ResolvedSpec> ResolveSpec(const ServiceContext& context, const v1::WeightSpec& spec,
                                         const v1::Environment& environment);

// The sets that a spec stood for before files were lost: what they were made from is gone in part or altogether, what
// is left of it is unchanged, and nothing else about them differs from what is asked for. By stat alone, which blocks.
std::vector<WeightSetRef> FindSetsOfGoneFiles(const ServiceContext& context, const v1::WeightSpec& spec,
                                              const v1::Environment& environment);

struct ClosestSet {
  WeightSetRef set;
  std::string requested_fingerprint;                   // of the spec, on the set's devices
  std::vector<v1::FingerprintDifference> differences;  // of that against the set's, sorted by field
};

struct SetsOfSpec {
  // Those with the spec's fingerprint, in whatever state they are listed; one for each kind of device.
  std::vector<WeightSetRef> same;
  // If there is none: of the sets of the same model that are resident or being loaded, the one that differs least.
  std::optional<ClosestSet> closest;
};
SetsOfSpec FindSets(const Registry& registry, const ResolvedSpec& resolved);

// FINGERPRINT_MISMATCH with every field that differs and both values, in the metadata and the message; where they are
// more than fit, with the number left out. Counts each field.
absl::Status MismatchError(Metrics& metrics, const ClosestSet& closest);

}  // namespace weightbroker
