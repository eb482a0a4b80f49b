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

// The set that a request without a publisher stands for: resident, being loaded, or loaded from now on, and pinned if
// the request says so. Blocks on files. Fails as a Register does before it waits.
absl::StatusOr<WeightSetRef> LoadSet(const ServiceContext& context, const v1::RegisterRequest& request);

// The fingerprint of that set, which may be here with other ranks or on other devices; nothing is begun. Where files
// that a set here was made from are gone, and what is left of them is unchanged, that set's. Blocks on files. Fails as
// ResolveSpec and WantSet do.
absl::StatusOr<std::string> FindWantedFingerprint(const ServiceContext& context, const v1::RegisterRequest& request);

}  // namespace weightbroker
