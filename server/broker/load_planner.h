// What a load would need, without the load: a loader checks the checkpoint and plans, and is ended before it has
// allocated anything. Nothing is begun in the registry, or kept.
//
//   ASSIGN_OR_RETURN(const PlannedLoad planned, PlanLoad(*registry, *spawner, request, std::chrono::minutes(1)));
//   ASSIGN_OR_RETURN(const RoomPlan room, registry->PlanRoom(planned.memory));
//
// Blocks, for as long as the headers of the checkpoint take to be read. Thread-safe.
#pragma once

#include <chrono>

#include "absl/status/statusor.h"
#include "server/broker/loader_spawner.h"
#include "server/broker/registry.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// Fails as the loader does, with LOADER_FAILED if it dies, LOADER_STALLED after `timeout`, PROTOCOL_ERROR, or DRAINING
// as soon as the service is.
absl::StatusOr<MemoryPlan> PlanLoad(const Registry& registry, LoaderSpawner& spawner,
                                    const internal::v1::LoadRequest& request, std::chrono::milliseconds timeout);

// What a loader says that it will need, for `ranks`. PROTOCOL_ERROR if it planned others.
absl::StatusOr<MemoryPlan> ToMemoryPlan(const internal::v1::LoadPlanned& planned,
                                        const std::vector<RankPlacement>& ranks);

}  // namespace weightbroker
