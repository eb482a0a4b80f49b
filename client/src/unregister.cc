#include "client/src/unregister.h"

#include <optional>
#include <string>
#include <utility>

#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

absl::StatusOr<v1::UnregisterResponse> Try(const Connection& connection, const v1::UnregisterRequest& request,
                                           Deadline deadline) {
  v1::UnregisterResponse response;
  RETURN_IF_ERROR(connection.CallOnce(deadline, [&](grpc::ClientContext& context) {
    return connection.admin_service().Unregister(&context, request, &response);
  }));
  return response;
}

absl::StatusOr<v1::ListWeightSetsResponse> List(const Connection& connection, Deadline deadline) {
  v1::ListWeightSetsResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.admin_service().ListWeightSets(&context, {}, &response);
  }));
  return response;
}

// The set that the service would take `prefix` for; none if that is for the service to refuse.
std::optional<v1::WeightSet> FindMeant(const v1::ListWeightSetsResponse& list, const std::string& prefix) {
  std::optional<v1::WeightSet> found;
  for (const v1::WeightSet& set : list.weight_sets()) {
    if (set.fingerprint().compare(0, prefix.size(), prefix) != 0) continue;
    if (found.has_value()) return std::nullopt;
    found = set;
  }
  return found;
}

bool IsSameRegistration(const v1::WeightSet& a, const v1::WeightSet& b) {
  return a.fingerprint() == b.fingerprint() && a.register_time().seconds() == b.register_time().seconds() &&
         a.register_time().nanos() == b.register_time().nanos();
}

bool IsThere(const v1::ListWeightSetsResponse& list, const v1::WeightSet& meant) {
  for (const v1::WeightSet& set : list.weight_sets()) {
    if (IsSameRegistration(set, meant)) return true;
  }
  return false;
}

v1::UnregisterResponse AlreadyReleased(v1::WeightSet set) {
  v1::UnregisterResponse response;
  set.set_state(v1::WEIGHT_SET_STATE_RELEASED);
  set.clear_shards();
  *response.mutable_weight_set() = std::move(set);
  return response;
}

}  // namespace

absl::StatusOr<v1::UnregisterResponse> UnregisterOnce(const Connection& connection,
                                                      const v1::UnregisterRequest& request, Deadline deadline) {
  ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse before, List(connection, deadline));
  const std::optional<v1::WeightSet> meant = FindMeant(before, request.fingerprint());
  Attempts attempts(connection, deadline);
  while (true) {
    auto response = Try(connection, request, deadline);
    if (response.ok() || !meant.has_value() || !attempts.ShallTryAgain(response.status())) return response;
    ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse now, List(connection, deadline));
    if (!IsThere(now, *meant)) return AlreadyReleased(*meant);
  }
}

}  // namespace weightbroker::client
