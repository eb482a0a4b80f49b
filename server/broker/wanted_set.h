// From what a Register asks for to the weight set that is to be loaded: where its ranks go, and which fingerprint it
// has there.
//
//   ASSIGN_OR_RETURN(const ResolvedSpec resolved, ResolveSpec(context, request.spec(), request.environment()));
//   ASSIGN_OR_RETURN(NewWeightSet wanted, WantSet(context, request, resolved));
//   ASSIGN_OR_RETURN(const WeightSetRef set, context.loads->Load(std::move(wanted)));
//
// Thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/broker/placement.h"
#include "server/broker/registry.h"
#include "server/broker/service_context.h"
#include "server/broker/spec_resolution.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

// As PlaceRanks on this service's devices. GPU_UNAVAILABLE with the cause where a GPU is asked for and none is served.
absl::StatusOr<Placement> PlaceRequest(const ServiceContext& context, const v1::RegisterRequest& request,
                                       const v1::WeightSpec& spec);

// Fails as PlaceRequest does.
absl::StatusOr<NewWeightSet> WantSet(const ServiceContext& context, const v1::RegisterRequest& request,
                                     const ResolvedSpec& resolved);

// ---- Of the desired state. All of these block on files.

// The set that such a request stands for: resident, being loaded, or loaded from now on, and pinned for the desired
// state. Fails as a Register does before it waits, and as CheckHeld does; then it is not pinned.
absl::StatusOr<WeightSetRef> LoadDesired(const ServiceContext& context, const v1::RegisterRequest& request);

// The fingerprint of that set, which may be here with other ranks or on other devices; nothing is begun. Where files
// that a set here was made from are gone, and what is left of them is unchanged, that set's. Fails as ResolveSpec and
// WantSet do.
absl::StatusOr<std::string> FindDesiredFingerprint(const ServiceContext& context, const v1::RegisterRequest& request);

// Whether a set that is here may prove to be the one of which no fingerprint can be found now: it was made from the
// same folder, and nothing but what is in it can differ.
bool MayProveToBe(const ServiceContext& context, const v1::RegisterRequest& request, const WeightSetEntry& set);

}  // namespace weightbroker
