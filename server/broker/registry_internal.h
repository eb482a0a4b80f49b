// What the registry's own source files share; nobody else includes it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/broker/registry.h"

namespace weightbroker::registry_internal {

void Call(const std::vector<std::function<void()>>& callbacks);

bool HasEnded(v1::WeightSetState state);
bool IsLoading(v1::WeightSetState state);

absl::Status IllegalMove(const WeightSetEntry& set, v1::WeightSetState from, v1::WeightSetState to);
absl::Status DrainingError();
absl::Status NotResidentError(const WeightSetEntry& set, const WeightSetView& view);

std::map<std::string, int64_t> BytesByDevice(const MemoryPlan& plan);
absl::Status CheckPlan(const MemoryPlan& plan);

absl::Status QuarantinedError(const WeightSetEntry& set, int32_t rank, const std::string& why);
// `advice` is what is to be done.
absl::Status StillLoadingError(const WeightSetEntry& set, const WeightSetView& view, const std::string& advice);

}  // namespace weightbroker::registry_internal
