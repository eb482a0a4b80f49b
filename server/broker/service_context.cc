#include "server/broker/service_context.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
// A set that failed does not count as asked for any more, since whoever asked has been told; but one that the
// configuration asks for does, since nobody has.
v1::HealthResponse::Status ServiceStatus(const RegistryTotals& totals, const Reconciler* reconciler) {
  if (totals.draining) return v1::HealthResponse::STATUS_DRAINING;
  if (totals.quarantined_shards > 0) return v1::HealthResponse::STATUS_QUARANTINED;
  if (totals.CountLoads() > 0) return v1::HealthResponse::STATUS_LOADING;
  if (reconciler != nullptr && !reconciler->IsSatisfied()) return v1::HealthResponse::STATUS_LOADING;
  if (totals.CountResident() > 0) return v1::HealthResponse::STATUS_READY;
  return v1::HealthResponse::STATUS_IDLE;
}

absl::Status WorkersBusyError() {
  return MakeError(Reason::kTooManyRequests,
                   "too many calls wait for model folders to be read: try again when some have ended");
}

}  // namespace weightbroker
