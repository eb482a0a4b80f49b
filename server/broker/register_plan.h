// The answer to a Register that is a dry run: what it would need, what there is, and what would be evicted for it.
//
//   ASSIGN_OR_RETURN(*response.mutable_plan(), MakeRegisterPlan(context, wanted));
//
// Blocks while a loader reads the headers of the checkpoint. Thread-safe; changes nothing.
#pragma once

#include "absl/status/statusor.h"
#include "server/broker/service_context.h"
#include "server/broker/weight_set.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

// INVALID_ARGUMENT for a set that an engine publishes, which no loader can plan; else as LoadManager::Plan and
// Registry::PlanRoom fail. That it would not fit is an answer, not an error.
absl::StatusOr<v1::RegisterPlan> MakeRegisterPlan(const ServiceContext& context, const NewWeightSet& wanted);

}  // namespace weightbroker
