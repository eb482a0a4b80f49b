// Attaching to a running service: lease, descriptors, mappings and manifest become a WeightsState.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/src/engine_device.h"
#include "client/src/services.h"
#include "client/src/weights_state.h"
#include "weightbroker/client.h"
#include "weightbroker/v1/types.pb.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// Makes the weights resident first, if the options ask for it and the service does not have them. Thread-safe.
absl::StatusOr<std::unique_ptr<WeightsState>> AttachToService(const Services& services, const v1::WeightSpec& spec,
                                                              const v1::Environment& environment,
                                                              const EngineDevice& engine, const AttachOptions& options);

// What the engine can map, best first.
std::vector<v1::HandleKind> KindsFor(const AttachOptions& options, const EngineDevice& engine);

// Puts into a request for `spec` what it is to be made as, and where: the kinds, and ranks and devices as far as the
// engine knows them.
void PlaceAsWanted(const AttachOptions& options, const EngineDevice& engine, bool one_service_per_gpu,
                   v1::RegisterRequest* request);

// Whether that failed only because the weights are not there, or not yet.
bool IsMissing(const absl::Status& status);

// Has the service make the weights resident, joining a load that is under way. Gives the set as it became resident.
absl::StatusOr<v1::WeightSet> RegisterAndWait(const Connection& connection, const v1::RegisterRequest& request,
                                              Deadline deadline,
                                              const std::function<void(const LoadProgress&)>& on_progress);

}  // namespace weightbroker::client
